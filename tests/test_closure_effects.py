"""Updates of LBFGS, which rounding moves as far as a hundredth: measured on one device, and mistakes are found nevertheless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.replica import replica as replicas
from meshloom.verify.findings import Report
from meshloom.verify.reference.reference import Reference
from meshloom.verify.run import verify
from meshloom.verify.tolerances.closure_effects import ClosureEffects
from tests.jobs import make_job, vectors

GRANTED = 1e-4  # float32, of optimizers that add up over parameters


class Two(nn.Module):
    """[batch, 7] -> [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 13), nn.Linear(13, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x)))


def steep_job(max_iter: int = 20) -> Job:
    """A ReLU network whose directions LBFGS computes of gradients that hardly differ: at lr 0.1 an evaluation is next to the one before."""
    return Job(
        model=Two, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), data=vectors, batch_size=12, steps=8,
        optimizer=lambda named: torch.optim.LBFGS([each for _, each in named], lr=0.1, max_iter=max_iter),
    )  # fmt: skip


def verified(job: Job, **settings: Any) -> Report:
    report = verify(job, Plan.parse("dp=2,microbatches=2"), devices="simulated", quick=True, **settings)
    assert report
    return report


def stepped(reference: Reference, effects: ClosureEffects) -> dict[str, float]:
    """A step; how far rounding moves each update, relative to it."""
    reference.run()
    effects.update()
    return {
        name: effects.of(name) / float((after.detach() - reference.before[name]).norm())
        for name, after in reference.parameters.items()
    }


@pytest.mark.long
def test_rounding_is_measured_to_move_updates_of_many_evaluations():
    of = Plan.parse("dp=2,microbatches=2")
    reference = Reference(steep_job(4), of)
    effects = ClosureEffects(reference)
    first, second = stepped(reference, effects), stepped(reference, effects)
    assert all(1e-6 < each < 1e-2 for each in first.values())
    assert max(second.values()) > GRANTED
    alone = Reference(steep_job(4), of)
    for _ in range(2):  # which the measurement has left as it was
        alone.run()
        alone.update()
    assert all(torch.equal(each, alone.parameters[name]) for name, each in reference.parameters.items())


def test_optimizers_that_evaluate_nothing_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    reference = Reference(make_job("mlp", "adamw"), Plan.parse("dp=2"))
    effects = ClosureEffects(reference)
    monkeypatch.setattr(reference, "rerun", None)
    assert set(stepped(reference, effects).values()) == {0.0}


@pytest.mark.parametrize("factor", [2.0, pytest.param(1.01, marks=pytest.mark.slow)])
@pytest.mark.long
def test_evaluations_that_are_off_by_a_factor_are_found(factor: float, monkeypatch: pytest.MonkeyPatch):
    right = replicas._evaluated  # pyright: ignore[reportPrivateUsage]

    def scaled(self: Any, found: Any) -> Any:
        gradients, loss = right(self, found)
        return [None if each is None else each * factor for each in gradients], loss

    monkeypatch.setattr(replicas, "_evaluated", scaled)
    report = verified(steep_job(5), steps=1)
    assert not report.passed
    assert report.first_wrong is not None
    assert {error.kind for error in report.first_wrong.errors if not error.passed} <= {"update", "parameter"}

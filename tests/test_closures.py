"""LBFGS, which evaluates the loss several times in a step, under every plan: a plain loop on one device computes the
same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.plan_shares import chunk_sizes
from meshloom.core.random import model_seed, seed_everything
from meshloom.data.samples import first_batches
from meshloom.planner.memory.measured import measure_memory
from meshloom.replica import replica as replicas
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import vectors
from tests.processes import on_ranks
from tests.verified import equals_one_device

TOLERANCE = 1e-10  # float64; sums over samples and ranks in other orders
SAMPLES, STEPS = 13, 4

pytestmark = pytest.mark.usefixtures("silent_export")


class MLP(nn.Module):
    """Two layers, a buffer that counts forwards, and a parameter that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def samples() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, 5, generator=made, dtype=torch.float64)
    return list(zip(x, torch.sin(x @ torch.randn(5, 3, generator=made, dtype=torch.float64)), strict=True))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def lbfgs(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, **{"lr": 0.5, "max_iter": 5, "history_size": 4, **settings})


def searching(parameters: Any) -> torch.optim.Optimizer:
    return lbfgs(parameters, lr=1, line_search_fn="strong_wolfe")


def closure_job(optimizer: Any = lbfgs, **settings: Any) -> ml.Job:
    given = {"batch_size": SAMPLES, "steps": STEPS, "seed": 5, "shuffle": False, **settings}
    return ml.Job(model=MLP, loss=loss, optimizer=optimizer, data=samples, **given)


def one_device(optimizer: Any, num_chunks: int, clip: float | None = None) -> Any:
    """The loss before, and the model after every step, of a plain loop."""
    seed_everything(model_seed(5))
    model = MLP()
    stepped = optimizer([(name, each) for name, each in model.named_parameters()])
    for _ in range(STEPS):

        def closure() -> float:
            stepped.zero_grad()
            total, start = 0.0, 0
            for size in filter(None, chunk_sizes(SAMPLES, num_chunks)):
                chunk = torch.utils.data.default_collate(samples()[start : start + size])
                start += size
                part = loss(model, chunk) * size / SAMPLES
                part.backward()
                total += float(part.detach())
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return total

        before = stepped.step(closure)
        yield float(before), model


PLANS = ["dp=1", "dp=1,microbatches=3", "dp=2", "dp=3,bucket_bytes=100", "tp=2", "dp=2,tp=2", "dp=2,recompute=full", "dp=2,exchange=ring"]  # fmt: skip


MARKS = {
    "dp=1": (),
    "dp=3,bucket_bytes=100": (),
    "tp=2": pytest.mark.long,
    "dp=1,microbatches=3": pytest.mark.long,
}


@pytest.mark.covering("dp=3,bucket_bytes=100-lbfgs", "dp=1,microbatches=3-searching", "tp=2-lbfgs")
@pytest.mark.parametrize("optimizer", [lbfgs, searching])
@pytest.mark.parametrize(
    "plan", [pytest.param(each, marks=MARKS.get(each, pytest.mark.slow)) for each in PLANS]
)
@pytest.mark.long
def test_evaluations_are_those_of_a_plain_loop(plan: str, optimizer: Any):
    parsed = ml.Plan.parse(plan)
    with ml.Trainer(closure_job(optimizer), parsed, devices="simulated", listener=QUIET) as trainer:
        for batch, (before, model) in zip(
            trainer.batches(), one_device(optimizer, parsed.num_chunks), strict=True
        ):
            assert trainer.step(batch) == pytest.approx(before, rel=TOLERANCE)
            found = trainer.together(full_state)[0]
            for name, value in model.named_parameters():
                assert torch.allclose(found[name].cpu(), value, rtol=TOLERANCE, atol=TOLERANCE), name
        assert trainer.replicas[0].evaluations > 3 * STEPS
        summary = trainer.summary(1.0, {}, None)
        assert summary.predicted == summary.counted


@pytest.mark.long
def test_clipping_is_of_every_evaluation():
    job = closure_job(clip_grad_norm=0.05)
    with ml.Trainer(job, "dp=2", devices="simulated", listener=QUIET) as trainer:
        for batch, (_, model) in zip(trainer.batches(), one_device(lbfgs, 2, clip=0.05), strict=True):
            trainer.step(batch)
            found = trainer.together(full_state)[0]
            assert all(torch.allclose(found[name].cpu(), value, atol=TOLERANCE) for name, value in model.named_parameters())  # fmt: skip
        summary = trainer.summary(1.0, {}, None)
        assert summary.predicted == summary.counted


@pytest.mark.parametrize(("saved", "resumed"), [("dp=2", "tp=2"), ("tp=2", "dp=1,microbatches=2")])
@pytest.mark.long
def test_its_history_goes_on_under_another_plan(saved: str, resumed: str, tmp_path: Path):
    with ml.Trainer(closure_job(searching), saved, devices="simulated", out=tmp_path, listener=QUIET) as trainer:  # fmt: skip
        for batch in trainer.batches():
            trainer.step(batch)
            if trainer.next_step == 2:
                trainer.save()
                break
    with ml.Trainer(closure_job(searching), resumed, devices="simulated", resume=tmp_path, listener=QUIET) as trainer:  # fmt: skip
        for batch in trainer.batches():
            trainer.step(batch)
        found = trainer.together(full_state)[0]
    *_, (_, model) = one_device(searching, 2)
    for name, value in model.named_parameters():
        assert torch.allclose(found[name].cpu(), value, rtol=1e-9, atol=1e-9), name  # four steps of rounding


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_verification_evaluates_as_often(plan: str):
    equals_one_device(closure_job(searching), plan)


def on_a_rank(plan: str) -> tuple[list[float], bool]:
    with ml.Trainer(closure_job(searching), plan, share=True, listener=QUIET) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
        summary = trainer.summary(1.0, {}, None)
        return losses, summary.predicted == summary.counted


@pytest.mark.processes
def test_processes_evaluate_as_often():
    expected = [before for before, _ in one_device(searching, 2)]
    for losses, is_as_predicted in on_ranks(on_a_rank, 2, "dp=2"):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert is_as_predicted


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("dp=2,exchange=server", "LBFGS looks at all parameters and at its history of them"),
        ("dp=2,exchange=server", "Use zero=0, exchange=all_reduce and offload=none."),
        ("dp=2,exchange=local_sgd,local_steps=2", "Use zero=0, exchange=all_reduce and offload=none."),
        ("dp=1,offload=optimizer", "Use zero=0, exchange=all_reduce and offload=none."),
    ],
)
def test_plans_that_divide_its_history_are_refused(plan: str, sentence: str):
    with pytest.raises(ml.MeshloomError, match=re.escape(sentence)):
        ml.Trainer(closure_job(), plan, devices="simulated", listener=QUIET)


@pytest.mark.long
@pytest.mark.covering("zero=3")
@pytest.mark.parametrize(
    ("plan", "zero"),
    [("dp=2,zero=1", 1), ("dp=2,zero=3", 3), pytest.param("dp=2,tp=2,zero=3", 3, marks=pytest.mark.slow)],
)
def test_where_its_history_cannot_be_divided_every_rank_keeps_all(
    plan: str, zero: int, capsys: pytest.CaptureFixture[str]
):
    equals_one_device(closure_job(), plan, steps=3)
    assert f"so every rank keeps all of them: zero={zero} divides nothing." in capsys.readouterr().err


def test_lbfgs_beside_another_optimizer_is_refused():
    both = lambda named: [lbfgs(named[:2]), torch.optim.SGD(named[2:], lr=0.1)]  # noqa: E731
    with pytest.raises(ml.MeshloomError, match="LBFGS evaluates the loss several times in a step, and the optimizer function returned 2"):  # fmt: skip
        ml.Trainer(closure_job(both), devices="simulated", listener=QUIET)


def test_the_memory_of_its_history_is_measured():
    """It cannot be predicted: two directions, two gradients and two steps of four parameters, and what a search takes."""
    job = closure_job(searching)
    found = measure_memory(job, first_batches(job, 1))
    num_elements = sum(each.numel() for each in MLP().parameters())
    assert found.optimizer >= 4 * 8 * num_elements


class Steep(nn.Module):
    """[batch, 7] -> [batch, 5]: a ReLU network whose directions are computed of gradients that hardly differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 13), nn.Linear(13, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x)))


def verified_steep(dtype: torch.dtype | None, **settings: Any) -> Report:
    job = ml.Job(
        model=Steep, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), data=vectors, batch_size=12, steps=8,
        optimizer=lambda named: torch.optim.LBFGS([each for _, each in named], lr=0.1, max_iter=20),
    )  # fmt: skip
    plan = ml.Plan.parse("dp=2,microbatches=2")
    report = verify(job, plan, devices="simulated", dtype=dtype, **settings)
    assert report
    return report


@pytest.mark.slow
def test_rounding_that_grows_in_its_directions_is_told_from_a_mistake_in_float64():
    report = verified_steep(None)
    assert report.passed or "LBFGS evaluates the loss itself, and rounding grows in its directions: --dtype float64 tells a mistake from it" in report.notes  # fmt: skip
    assert verified_steep(torch.float64, quick=False).passed


@pytest.mark.parametrize("factor", [2.0, pytest.param(1.01, marks=pytest.mark.slow)])
@pytest.mark.long
def test_evaluations_that_are_off_by_a_factor_are_found(factor: float, monkeypatch: pytest.MonkeyPatch):
    right = replicas._evaluated  # pyright: ignore[reportPrivateUsage]

    def scaled(self: Any, found: Any) -> Any:
        gradients, loss = right(self, found)
        return [None if each is None else each * factor for each in gradients], loss

    monkeypatch.setattr(replicas, "_evaluated", scaled)
    report = verified_steep(torch.float64, steps=1)
    assert report.first_wrong is not None
    assert {error.kind for error in report.first_wrong.errors if not error.passed} <= {"update", "parameter"}

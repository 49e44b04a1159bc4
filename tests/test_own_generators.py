"""Modules that draw with a `torch.Generator` of their own: each chunk finds it as it would on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import meshloom.replica.chunk_scope
from meshloom.core.errors import CaptureError
from meshloom.core.job import Evaluate, Job
from meshloom.core.modules.own_generators import OwnGenerator, drawing_modules, own_generators
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.jobs_in_memory import job_of, normal, sgd
from tests.verified import equals_one_device, report_on


class Noisy(nn.Module):
    """x [n, d] -> [n, d]"""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn(x.shape, generator=self.source, dtype=x.dtype).to(x.device)


class Scaled(nn.Linear):
    """Draws at its construction alone."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.source = torch.Generator().manual_seed(6)
        with torch.no_grad():
            self.bias.uniform_(generator=self.source)


def model() -> nn.Sequential:
    return nn.Sequential(Scaled(5, 8), Noisy(), nn.Tanh(), Scaled(8, 3))


def job(leaves: tuple[type[nn.Module], ...] = (Noisy,)) -> Job:
    data = list(normal(3, 5))
    return job_of(model, lambda model, x: model(x).square().mean(), data, optimizer=sgd, leaves=leaves)


def test_those_that_a_constructor_alone_draws_with_are_none():
    assert [name for name, _ in own_generators(model())] == ["1.source"]
    assert list(drawing_modules(model())) == ["1"]


def test_a_program_draws_with_torchs_own_outside_of_leaves_that_are_named():
    with pytest.raises(
        CaptureError, match=r"^1 draws with a generator of its own, source.* write leaves=\[Noisy\]"
    ) as refused:
        Trainer(job(leaves=()), "tp=2", devices="simulated")
    assert refused.value.exit_code == 2


def mean_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2", "pp=2,microbatches=2"])
@pytest.mark.usefixtures("silent_export", "dear_memory")
@pytest.mark.slow
def test_evaluations_draw_alike_under_every_plan(plan: str):
    """Metrics went on drawing from where the rank's last chunk had left the generator."""
    evaluate = Evaluate(
        data=lambda: list(normal(4, 5)), metrics={"first": mean_output, "second": mean_output}, every=1
    )
    still = replace(
        job(),
        evaluate=evaluate,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=1e-12),
    )
    with Trainer(still, plan, devices="simulated", dtype=torch.float64) as trainer:
        first = trainer.evaluate()
        trainer.step(next(trainer.batches()))
        again = trainer.evaluate()
    assert again == pytest.approx(first, rel=1e-6)
    assert first["first"] == first["second"]
    report = equals_one_device(still, plan, quick=False, steps=3)
    assert any("evaluation" in each.what for each in report.between)


@pytest.mark.parametrize(
    "plan", ["dp=2", slow("tp=2"), "pp=2,microbatches=2", slow("dp=2,zero=3,microbatches=2")]
)
@pytest.mark.usefixtures("silent_export", "dear_memory")
@pytest.mark.long
def test_a_job_equals_one_device(plan: str):
    """Draws followed those of the chunks that the replica had before; a program drew once for all steps."""
    report = equals_one_device(job(), plan, steps=3)
    assert plan != "tp=2" or max(report.owned) < 0.7  # all but the noise is divided


@pytest.mark.usefixtures("silent_export", "dear_memory")
@pytest.mark.long
def test_generators_that_draw_alike_are_found(monkeypatch: pytest.MonkeyPatch):
    """One device seeds them by itself: by what ranks seed theirs it drew what they drew."""
    two = job_of(
        lambda: nn.Sequential(Noisy(), nn.Linear(5, 5), Noisy(), nn.Linear(5, 3)),
        lambda model, x: model(x).square().mean(),
        list(normal(3, 5)),
        optimizer=sgd,
    )

    def alike(found: list[OwnGenerator], seed: int) -> None:
        for _, generator in found:
            generator.manual_seed(seed)

    monkeypatch.setattr(meshloom.replica.chunk_scope, "seed_own_generators", alike)
    report = report_on(two, "dp=2", steps=3, dtype=None)
    assert not report.passed
    wrong = report.first_wrong
    assert wrong is not None and wrong.first_module == "0"

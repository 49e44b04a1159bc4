"""Verification of the product itself: correct runs pass with room to spare, and reports say what they
should."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.findings import Report
from meshloom.verify.reference.reference import Reference
from tests.jobs import MODELS, OPTIMIZERS, images, make_job, token_loss
from tests.reports import text_of
from tests.verified import report_on


def run(
    job: Job, plan: str, dtype: torch.dtype | None = None, steps: int = 3, transport: str = "auto"
) -> Report:
    return report_on(job, plan, dtype=dtype, steps=steps, transport=transport)


def used_up(report: Report) -> float:
    """The largest share of a tolerance that an error took."""
    errors = [error for step in report.steps for error in step.errors if error.error]
    return max((error.error / error.tolerance for error in errors), default=0.0)


PLANS = [
    (dp, m, zero) for dp, m, zero in itertools.product([1, 2, 3, 4], [1, 2, 5], [0, 1]) if dp > 1 or not zero
]
BATCHES = [12, 13, 3]  # even, uneven, empty shares
# Every plan once, with models, optimizers and batches going round at different speeds, so that pairs of
# settings meet.
CASES = [
    (MODELS[i % 5], OPTIMIZERS[(i + i // 5) % 4], BATCHES[(i + i // 4) % 3], *plan)
    for i, plan in enumerate(PLANS)
]


@pytest.mark.parametrize(("model", "optimizer", "batch_size", "dp", "m", "zero"), CASES)
@pytest.mark.slow
def test_a_correct_run_passes_with_room_to_spare(model, optimizer, batch_size, dp, m, zero):
    job, plan = (
        make_job(model, optimizer, batch_size=batch_size),
        f"dp={dp},microbatches={m},zero={zero},bucket_bytes=300",
    )
    in_float32, in_float64 = run(job, plan), run(job, plan, torch.float64)
    assert in_float32.passed and in_float64.passed
    # tolerances are measured, so the room is that of two draws of rounding
    assert used_up(in_float32) < 0.5
    assert used_up(in_float64) < 0.5
    assert in_float32.first_wrong is None and not in_float32.explained


@pytest.mark.long
def test_without_chunks_that_interact_the_whole_batch_is_the_same():
    report = run(make_job("mlp", "sgd", batch_size=13), "dp=4", torch.float64)
    assert report.whole and report.whole.equal and report.whole.error < 1e-14
    assert "; on the whole batch: equal (largest error of a gradient " in text_of(report).splitlines()[0]


@pytest.mark.long
def test_a_report_is_text_and_json():
    report = run(make_job("gpt", "muon"), "dp=2,zero=1", torch.float64)
    records = json.loads(json.dumps(report.records(), allow_nan=False))
    assert [record["event"] for record in records] == ["verify_step"] * 3 + ["verify"]
    assert records[-1]["passed"] is True and records[-1]["casts"] == [
        {
            "place": "Muon",
            "dtype": "bfloat16",
            "in_optimizer": True,
            "in_gradients": False,
            "in_products": False,
        }
    ]
    assert sum(records[-1]["owned"]) == pytest.approx(1.0)
    shown = text_of(report)
    assert "EQUAL to one device that runs the same chunks: 3 steps" in shown
    assert "computed in bfloat16, in Muon: what it updates may differ as bfloat16 does" in shown
    assert "sharded: ranks own 5" in shown


def normed(inner: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 32), inner or nn.Tanh(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 5))  # fmt: skip


@pytest.mark.long
def test_what_is_nothing_but_rounding_is_said_and_is_no_error():
    """A bias before a batch norm: the table said that it was off by 0.9 of itself, beside a tolerance of 7."""
    job = replace(make_job("mlp", "sgd"), model=normed, batch_size=32)
    report = run(job, "dp=2,tp=2,microbatches=2")
    shown = text_of(report)
    assert report.passed and max(each.error for each in report.worst(99)) < 1e-4
    assert "1 gradient (2.bias) is nothing but rounding, on one device too, as the terms of the sum cancel" in shown  # fmt: skip


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.long
def test_a_job_whose_own_dtypes_make_float64_impossible_is_told_so(plan: str):
    job = replace(make_job("mlp", "sgd"), model=lambda: normed(Narrow()))
    with pytest.raises(JobError, match=r"In float64 this job cannot be computed.* without --dtype"):
        run(job, plan, torch.float64)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x).mul_(2)


@pytest.mark.long
def test_a_job_that_breaks_its_own_backward_is_told_so_and_nothing_of_dtypes():
    with pytest.raises(Exception, match="modified by an inplace operation") as raised:
        run(replace(make_job("mlp", "sgd"), model=lambda: normed(Doubled())), "dp=2", torch.float64)
    assert "cannot be computed" not in str(raised.value)


@pytest.mark.long
def test_a_failing_report_names_step_module_and_factor(monkeypatch):
    import meshloom.replica.chunk_scope

    chunk_seed = meshloom.replica.chunk_scope.chunk_seed
    monkeypatch.setattr(
        meshloom.replica.chunk_scope, "chunk_seed", lambda seed, step, chunk: chunk_seed(seed, step, 0)
    )
    report = run(make_job("cnn", "sgd"), "dp=2")
    shown = text_of(report)
    assert not report.passed
    first, second, *_ = shown.splitlines()  # above the tables
    assert (
        first.startswith("DIFFERS from step 0 on") and "first module: dropout; on the whole batch: " in first
    )
    assert second.endswith("are those of replicas that draw as the first one does: their random draws, such as dropout masks, are equal.")  # fmt: skip
    assert second.startswith("  The gradients of ") and report.records()[-1]["explained"] == second.strip()
    assert json.dumps(report.records(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.long
def test_nothing_is_kept_of_the_tensors_that_are_compared(optimizer, dtype):
    """The story: rank 0 held fifteen copies of a model beside its own, each of them gathered on every other
    rank, too, so that 124M parameters took 15 GB."""
    reference = Reference(make_job("gpt", optimizer), Plan(dp=2), dtype)
    plan = Reference(make_job("gpt", optimizer), Plan(dp=2), dtype)
    comparison = ComparisonRun(reference)
    for step in range(2):
        plan.run()
        comparison.begin()
        for name, gradient in plan.gradients.items():
            sent = None if gradient is None else gradient.clone()
            memory = None if sent is None else StorageWeakRef(sent.untyped_storage())
            comparison.add_gradient(name, sent)
            del sent
            assert memory is None or memory.expired(), f"step {step}: the gradient of {name} is kept"
        record = plan.update()
        comparison.update()
        for name, each in {**plan.parameters, **dict(plan.model.named_buffers())}.items():
            sent = each.detach().clone()
            memory = StorageWeakRef(sent.untyped_storage())
            comparison.add_state(name, sent)
            del sent
            assert memory.expired(), f"step {step}: {name} is kept"
        comparison.end(record)
    assert all(step.passed for step in comparison.result().steps)


@pytest.mark.long
def test_replicas_that_drift_apart_are_reported_and_end_nothing(monkeypatch):
    from meshloom.exchange.all_reduce import AllReduce

    publish = AllReduce.publish

    def drift(self: Any) -> Any:
        if self._group.rank:
            self.ownership.owned[0].data().add_(1e-3)
        return publish(self)

    monkeypatch.setattr(AllReduce, "publish", drift)
    report = run(make_job("mlp", "sgd"), "dp=2", steps=1, transport="gloo")
    assert report.first_wrong and "Replicas 0 and 1 hold different parameters" in report.first_wrong.facts[0]


class Augmented(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        sample = images()[index]
        return {**sample, "x": sample["x"] + torch.randn(1, 6, 6)}


def noisy_collate(samples: list[Any]) -> Any:
    return {
        name: torch.stack([sample[name] for sample in samples]) + (torch.rand(()) if name == "x" else 0)
        for name in ("x", "y")
    }


@pytest.mark.long
def test_draws_while_reading_and_collating_are_the_same():
    assert run(
        make_job("cnn", "sgd", data=Augmented, collate=noisy_collate), "dp=2,microbatches=2", torch.float64
    ).passed


class HalfInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 6)
        self.low = Low()

    def forward(self, x: Tensor) -> Tensor:
        return self.low(self.body(x))


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.head.weight.float(), self.head.bias.float()).to(x.dtype)


@pytest.mark.long
def test_a_module_that_casts_is_named_and_widens_no_tolerance():
    """The story: one cast to float32 let every tensor of a run in float64 be off by 1e-4."""
    report = run(replace(make_job("mlp", "sgd"), model=HalfInside), "dp=3", torch.float64)
    assert report.passed
    assert max(error.tolerance for step in report.steps for error in step.errors) < 1e-10
    assert "computed in float32, in the model or loss, low: " in text_of(report)


@pytest.mark.long
def test_a_plateau_scheduler_gets_the_loss_on_both_sides():
    job = make_job(
        "mlp",
        "sgd",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    )
    assert run(job, "dp=2", torch.float64, steps=4).passed


@pytest.mark.long
def test_a_wrong_learning_rate_on_the_ranks_is_seen_in_the_updates():
    made: list[int] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made.append(len(made))
        return torch.optim.SGD(named, lr=1e-5 if len(made) <= 3 else 2e-5)  # the fourth is one device's

    report = run(replace(make_job("mlp", "sgd", scheduler=None), optimizer=optimizer), "dp=2")
    assert not report.passed and {error.kind for error in report.steps[0].errors if not error.passed} == {
        "update"
    }


@pytest.mark.long
def test_errors_that_are_infinite_stay_out_of_json():
    report = run(make_job("mlp", "sgd"), "dp=2", steps=1)
    step = replace(report.steps[0], errors=[replace(report.steps[0].errors[0], error=math.inf)])
    assert replace(report, steps=[step]).records()[0]["errors"][0]["error"] is None


@pytest.mark.long
def test_all_modules_that_compute_in_bfloat16_are_one_line():
    """The story: under autocast every Linear had a line of its own, 73 of them for a GPT."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        with torch.autocast(batch["x"].device.type, torch.bfloat16):
            return token_loss(model, batch)

    report = run(replace(make_job("gpt", "adamw", loss=loss)), "dp=2", steps=1)
    lines = [line for line in text_of(report).splitlines() if "bfloat16" in line]
    named = [cast.place for cast in report.casts if cast.place]
    assert len(lines) == 1 and len(named) > 3
    assert lines[0].startswith("computed in bfloat16, in the model or loss, ")
    assert lines[0].endswith(
        f" and {len(named) - 2} more: nothing is tolerated for it but what rounding is measured to do"
    )

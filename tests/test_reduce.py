"""reduce=: what gradients travel as between replicas; a sum of rounded gradients is one device's within that rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.comm.collectives import travelling
from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.fitted import fitted
from tests.planted import BUGS
from tests.planted.jobs import JOBS
from tests.precision_jobs import MODELS, job_of
from tests.processes import on_ranks
from tests.verified import report_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

UNIT = 2.0**-8  # half a unit of bfloat16, of numbers just above a power of two
PLANS = [
    "dp=2", "dp=2,zero=1", "dp=2,microbatches=2,zero=2", "dp=2,zero=3", "dp=4,zero=3,zero_within=2", "dp=3,exchange=server,servers=2",
    "dp=4,exchange=ring", "dp=3,exchange=ring,zero=1", "dp=2,overlap=false,bucket_bytes=1000",
    "dp=2,pp=2,microbatches=2,zero=2", "dp=2,tp=2", "dp=2,tp=2,zero=3", "dp=2,recompute=full", "dp=2,offload=optimizer",
    "dp=2,sync_batch_norm=true",
]  # fmt: skip
QUICK = {("mlp", "dp=2,zero=1"), ("mlp", "dp=3,exchange=server,servers=2"), ("cnn", "dp=2,zero=3")}
CASES: Sequence[Any] = [
    pytest.param(model, plan, marks=() if (model, plan) in QUICK else pytest.mark.slow)
    for model in ("mlp", "cnn")
    for plan in PLANS
] + [
    pytest.param(model, plan, marks=pytest.mark.slow)
    for model in MODELS
    if model not in ("mlp", "cnn")
    for plan in ("dp=2", "dp=2,microbatches=2,zero=2")
]  # fmt: skip


def verified(of: Job, plan: str | Plan, **settings: Any) -> Report:
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return report_on(of, replace(plan, reduce="bf16"), **{"steps": 3, "dtype": None, **settings})


class Opposites(list[dict[str, Tensor]]):
    """Batches of 12, whose second half is nearly the first one's opposite."""


def errors_of(report: Report, kind: str) -> list[float]:
    return [error.error for step in report.steps for error in step.errors if error.kind == kind]


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_gradients_are_one_devices_but_for_their_rounding(model: str, plan: str):
    report = verified(job_of(model), plan)
    assert report.passed, [str(each) for each in report.worst()]
    assert max(errors_of(report, "gradient")) > 1e-5  # they were rounded
    for kind in ("loss", "buffer", "norm", "parameter", "update"):
        assert max(errors_of(report, kind), default=0.0) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,pp=2,microbatches=2"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_it_goes_together_with_a_precision(plan: str, precision: str):
    report = verified(job_of("mlp"), f"{plan},precision={precision}")
    assert report.passed, [str(each) for each in report.worst()]


def test_parts_that_cancel_have_their_own_rounding():
    """Of two replicas whose gradients are almost opposite: the sum's error is that of its terms."""

    x = torch.randn(18, 7, generator=torch.Generator().manual_seed(4))
    data = Opposites(
        {"x": x[number // 12 * 6 + number % 6], "sign": torch.tensor(1.0 if number % 12 < 6 else -0.95)}
        for number in range(36)
    )

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).float().sum(1) * batch["sign"]).mean()

    of = job_of("mlp", data=lambda: data, loss=loss, shuffle=False)
    report = verified(of, "dp=2", steps=2)
    assert report.passed, [str(each) for each in report.worst()]
    assert max(errors_of(report, "gradient")) > 2 * 2 * UNIT  # more than two replicas' own rounding


def test_float32_is_the_default_of_gradients_in_float32():
    def losses(plan: str) -> list[float]:
        with Trainer(job_of("mlp"), plan, devices="simulated", cache="off", listener=QUIET) as trainer:
            return [trainer.step(batch) for batch in trainer.batches()]

    assert losses("dp=2") == losses("dp=2,reduce=float32")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_half_gradients_travel_in_float32(plan: str):
    """A job of its own in bfloat16: sums of several replicas are rounded once, not on the way."""
    made = job_of("mlp")

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch["x"].bfloat16()).float(), batch["y"])

    of = replace(made, model=lambda: made.model().bfloat16(), loss=loss)
    found: list[int] = []
    for reduce in ("own", "float32"):
        summary = fitted(of, f"{plan},reduce={reduce}", cache="off", listener=QUIET)
        assert summary.predicted == summary.counted
        sent = summary.counted.bytes["dp"]
        found.append(sent["reduce_scatter" if "zero" in plan else "all_reduce"])
    assert 1.7 * found[0] < found[1] < 2.1 * found[0]


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == "dp=2,zero=3" else pytest.mark.slow) for plan in PLANS]
)
def test_bytes_are_as_predicted_and_gradients_half(plan: str):
    found: list[int] = []
    for reduce in ("own", "bf16"):
        of = job_of("mlp", drop_last=True)
        of = replace(of, evaluate=Evaluate(of.data, {"loss": of.loss}, every=2))
        with Trainer(
            of, f"{plan},reduce={reduce}", devices="simulated", cache="off", listener=QUIET
        ) as trainer:
            summary = trainer.fit()
        assert summary.predicted == summary.counted
        kinds = summary.counted.bytes["dp"]
        own = {"server": "gather"}.get(
            trainer.plan.exchange, "reduce_scatter" if trainer.plan.zero else "all_reduce"
        )
        found.append(kinds.get(own, 0) or summary.counted.total("dp"))
    assert 0.45 * found[0] < found[1] < 0.75 * found[0]


def test_a_sum_of_copies_is_cast_as_torch_casts():
    class One:
        """A group of this rank and one with the same gradients."""

        size, rank, is_in_place = 2, 0, False

        def all_reduce(self, flat: Tensor) -> Any:
            flat.mul_(2)
            return Done()

    class Done:
        def wait(self) -> None:
            pass

        def is_finished(self) -> bool:
            return True

    for dtype in (torch.float32, torch.complex64, torch.float64):
        flat = torch.randn(33, dtype=dtype)
        expected = flat.clone() * 2
        if dtype == torch.float32:
            expected = (flat.bfloat16() * 2).float()
        if dtype == torch.complex64:
            expected = torch.view_as_complex((torch.view_as_real(flat).bfloat16() * 2).float())
        one: Any = One()
        sums = TravellingSums(one, torch.bfloat16)
        work = sums.all_reduce(flat)
        assert work.is_finished()
        for _ in range(2):
            work.wait()
        assert torch.equal(flat, expected)
        width = {torch.float32: 2, torch.complex64: 4, torch.float64: 8}[dtype]
        assert sums.num_bytes(33, dtype) == 33 * width
    assert torch.float64 in travelling.NEVER_CAST


def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch):
    BUGS["sixth/all_reduce_last_undivided"].plant(monkeypatch)
    assert not verified(JOBS["weighted"](), "dp=2", steps=2).passed


def _on_processes(plan: str) -> bool | None:
    report = verify(job_of("mlp"), Plan.parse(f"{plan},reduce=bf16"), devices="cpu")
    return None if report is None else report.passed and max(errors_of(report, "gradient")) > 1e-5


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    ["dp=2,zero=1", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("dp=2", "dp=2,zero=2,microbatches=2"))],
)  # fmt: skip
def test_on_processes(plan: str):
    assert on_ranks(_on_processes, 2, plan, timeout_seconds=200.0) == [True, None]

"""precision=bf16-mixed: what one device computes under autocast, under every plan; and bugs are found in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Evaluate, Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.plan import Plan
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.capture import capture
from meshloom.train.trainer import Trainer
from tests.fitted import fitted
from tests.planted import BUGS
from tests.planted.jobs import JOBS
from tests.precision_jobs import job_of
from tests.test_memory import job_and_batches
from tests.verified import report_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def losses(job: Job, plan: str) -> list[float]:
    with Trainer(job, plan, devices="simulated", cache="off") as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]


def under_autocast(job: Job) -> Job:
    """The job whose loss opens autocast itself."""

    def loss(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return job.loss(model, batch)

    return replace(job, loss=loss)


@pytest.mark.parametrize(
    "plan",
    ["dp=2,microbatches=2", pytest.param("pp=2,microbatches=2,schedule=zb-v", marks=pytest.mark.slow)],
)
def test_it_is_what_a_loss_does_that_opens_autocast_itself(plan: str):
    job = job_of("gpt")
    mixed = losses(job, f"{plan},precision=bf16-mixed")
    assert (
        mixed
        == losses(under_autocast(job), plan)
        == losses(under_autocast(job), f"{plan},precision=bf16-mixed")
    )
    assert mixed != losses(job, plan)


def test_metrics_are_computed_under_autocast_too():
    seen: list[torch.dtype] = []

    def metric(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append((returned := model(batch["x"])).dtype)
        return returned.float().mean()

    job = job_of("mlp")
    job = replace(job, evaluate=Evaluate(job.data, {"mean": metric}, every=3))
    fitted(job, "dp=2,precision=bf16-mixed")
    assert set(seen) == {torch.bfloat16}


@pytest.mark.slow
def test_workers_of_an_asynchronous_run_compute_under_autocast():
    seen: list[torch.dtype] = []
    job = job_of("mlp")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append((returned := model(batch["x"])).dtype)
        return torch.nn.functional.cross_entropy(returned, batch["y"])

    fitted(replace(job, loss=loss), "dp=2,exchange=async,precision=bf16-mixed")
    assert set(seen) == {torch.bfloat16}


@pytest.mark.covering("experts")
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("experts", "dp=2,microbatches=2,zero=1"),
        # where sums of experts' outputs cross, they are float32
        ("mlp", "pp=2,microbatches=3,schedule=zb-v,cuts=second+third+norm"),
        ("mlp", "dp=2,pp=2,tp=2,microbatches=2,zero=1,cuts=third"),
        ("experts", "dp=2,zero=3"),
    ],
)
def test_bytes_are_as_predicted_and_activations_are_half(model: str, plan: str):
    counted: list[int] = []
    for precision in ("float32", "bf16-mixed"):
        job = job_of(model, drop_last=True)
        job = replace(job, evaluate=Evaluate(job.data, {"loss": job.loss}, every=2))
        summary = fitted(job, f"{plan},precision={precision}", cache="off")
        assert summary.predicted == summary.counted
        counted.append(summary.counted.total("pp") if "pp" in plan else summary.counted.total("dp"))
    if "pp" in plan:  # activations between stages
        assert counted[1] < 0.8 * counted[0]
    else:  # gradients and parameters
        assert counted[1] == counted[0]


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_memory_of_a_step_is_predicted(model: str):
    job, batches = job_and_batches(model, "adamw")
    mixed = in_precision(job, Plan(precision="bf16-mixed"))
    predicted = predict_memory(capture(mixed, (batches[0], batches[1])), mixed.optimizer)
    measured = measure_memory(mixed, batches[:1])
    assert (predicted.parameters, predicted.optimizer, predicted.gradients) == (
        measured.parameters, measured.optimizer, measured.gradients,
    )  # fmt: skip
    assert predicted.kept == pytest.approx(measured.kept, rel=0.02)


@pytest.mark.slow
def test_a_program_in_another_precision_is_not_used_from_the_cache(tmp_path: Any):
    def cached(plan: str) -> list[float]:
        with Trainer(job_of("mlp"), plan, devices="simulated", cache=tmp_path) as trainer:
            return [trainer.step(batch) for batch in trainer.batches()]

    plan = "pp=2,microbatches=2"
    first = cached(plan)
    mixed = cached(f"{plan},precision=bf16-mixed")
    assert mixed == losses(job_of("mlp"), f"{plan},precision=bf16-mixed") != first
    assert cached(plan) == first and cached(f"{plan},precision=bf16-mixed") == mixed


def test_a_job_in_a_precision_is_wrapped_once():
    plan = Plan(precision="bf16-mixed")
    job = in_precision(job_of("mlp"), plan)
    assert in_precision(job, plan) is job


def test_a_bug_of_the_plan_is_found_under_autocast(monkeypatch: pytest.MonkeyPatch):
    BUGS["sixth/all_reduce_last_undivided"].plant(monkeypatch)
    plan = Plan.parse("dp=2,precision=bf16-mixed")
    report = report_on(JOBS["weighted"](), plan, transport="gloo", steps=1, dtype=None)
    assert not report.passed and report.steps[0].first_module == "first"

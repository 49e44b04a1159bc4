"""Mistakes that are planted into a hand-written data-parallel run get their name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.comparing import ComparisonResult
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import gradients_of
from tests.covering import few
from tests.held import WholeRecord, hold_against, step_of
from tests.jobs import MODELS, OPTIMIZERS, make_job
from tests.simulated_dp import simulate

PLANS = [Plan(dp=2, microbatches=3), Plan(dp=3, microbatches=2)]


def found(
    job: Job, plan: Plan, bug: str = "", dtype: torch.dtype | None = None, steps: int = 2
) -> ComparisonResult:
    return hold_against(Reference(job, plan, dtype), simulate(job, plan, bug, dtype, steps))


def kinds(of: ComparisonResult) -> list[str]:
    return [cause.kind for cause in of.causes]


@pytest.mark.covering("mlp-sgd", "cnn-adamw", "gpt-muon", "unused_twice-adafactor")
@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_correct_run_has_no_cause(model, optimizer):
    dtype = (None, torch.float64)[(MODELS.index(model) + OPTIMIZERS.index(optimizer)) % 2]
    right = found(make_job(model, optimizer), PLANS[0], dtype=dtype, steps=3)
    assert all(step.passed for step in right.steps) and not right.causes


@pytest.mark.covering("mlp")
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "plan"),
    [("mlp", PLANS[0]), ("gpt", PLANS[1]), pytest.param("unused_twice", PLANS[0], marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize(
    ("bug", "kind", "words"),
    [
        ("not divided by dp", "scale", "dp = {dp} times one device's"),
        ("not divided by m", "scale", "microbatches = {m} times one device's"),
        ("divided by own weight", "scale", "weight of replica 0 alone"),
        ("mean of means", "mean of means", "plain mean of the replicas' means"),
        ("mean of chunk means", "mean of means", "plain mean of the chunks' means"),
        ("last microbatch only", "microbatches", "last microbatch alone"),
        ("missing chunk", "missing chunk", "without the share of chunk 0"),
        ("not reduced", "not reduced", "head.bias"),
        ("reduced twice", "reduced twice", "dp = {dp} times one device's and the others right"),
        ("clip before averaging", "clipping", "before they are averaged"),
        ("wrong clip norm", "clipping", "a part of the model is left out"),
        ("stale", "stale", "1 times those of the step before"),
        ("other state", "optimizer", "until step 1"),
        ("shared data", "data", "replicas share data"),
        ("drift", "replicas", "drift apart"),
        (
            "uneven factors",
            "unknown",
            "mix the chunks with wrong factors (chunk: factor, where 1 is right) 0: 1, 1: 1.14, 2: 1.29",
        ),
        ("noise", "unknown", "of it is something else"),
    ],
)
def test_a_mistake_is_named(model, plan, bug, kind, words):
    if bug == "not reduced" and model == "gpt":
        words = "blocks.1.down.bias"
    wrong = found(make_job(model, "sgd", batch_size=13), plan, bug)
    assert not all(step.passed for step in wrong.steps)
    assert kinds(wrong) == [kind]
    assert words.format(dp=plan.dp, m=plan.microbatches) in (
        wrong.causes[0].sentence if bug != "not reduced" or model != "gpt" else words
    )


@pytest.mark.long
@pytest.mark.covering("mean of means", "other state")
@pytest.mark.parametrize(
    "bug",
    few(
        [
            "mean of means",
            "stale",
            "not reduced",
            "last microbatch only",
            "clip before averaging",
            "other state",
        ],
        2,
    ),
)
def test_float64_names_the_same_mistakes(bug):
    job = make_job("mlp", "sgd", batch_size=13)
    assert kinds(found(job, PLANS[0], bug, torch.float64)) == kinds(found(job, PLANS[0], bug))


@pytest.mark.long
@pytest.mark.parametrize("bug", few(["tied twice", "tied twice in the norm"]))
def test_a_tied_weight_that_is_counted_twice_is_named(bug):
    wrong = found(make_job("gpt", "sgd"), PLANS[0], bug)
    assert kinds(wrong) == ["tied"]
    assert "embed.weight" in wrong.causes[0].sentence


@pytest.mark.long
@pytest.mark.parametrize("model", few(["cnn", "gpt"]))
def test_masks_that_replicas_share_are_named(model):
    wrong = found(make_job(model, "sgd"), PLANS[0], "same masks")
    assert kinds(wrong) == ["same draws"]
    assert "Chunks 0 and 3 (replicas 0 and 1) use the same random draws" in wrong.causes[0].sentence


def test_masks_that_one_device_shares_too_are_named(monkeypatch):
    for module in ("meshloom.verify.reference.chunk_run", "tests.simulated_dp"):
        monkeypatch.setattr(f"{module}.chunk_seed", lambda seed, step, chunk: 1000 + step)
    wrong = found(make_job("cnn", "sgd"), PLANS[0])
    assert kinds(wrong) == ["same draws"]


@pytest.mark.long
def test_only_the_first_wrong_step_is_diagnosed():
    wrong = found(make_job("mlp", "adamw"), PLANS[0], "stale", steps=3)
    assert [step.passed for step in wrong.steps] == [True, False, False]
    assert kinds(wrong) == ["stale"]


def changed(job: Job, plan: Plan, **fields: Any) -> ComparisonResult:
    """A correct run whose records of every step say something else."""

    def change(record: WholeRecord) -> WholeRecord:
        return replace(record, **{name: value(record) for name, value in fields.items()})

    return hold_against(Reference(job, plan), map(change, simulate(job, plan, steps=1)))


def test_a_wrong_weight_is_named():
    def heavier(record: WholeRecord) -> Any:
        return [replace(record.chunks[0], weight=record.chunks[0].weight + 1), *record.chunks[1:]]

    wrong = changed(
        make_job("mlp", "sgd"),
        PLANS[0],
        chunks=heavier,
        gradients=lambda record: {name: 0.9 * each for name, each in record.gradients.items()},
    )
    assert kinds(wrong) == ["weights"]


def test_zeros_instead_of_no_gradient_are_named():
    def zeros(record: WholeRecord) -> Any:
        return {
            name: torch.zeros_like(record.parameters[name]) if each is None else each
            for name, each in record.gradients.items()
        }

    wrong = changed(make_job("unused_twice", "adamw"), PLANS[0], gradients=zeros)
    assert kinds(wrong) == ["None or zero"] and "unused.weight" in wrong.causes[0].sentence


def test_running_statistics_of_one_replica_are_named():
    wrong = changed(
        make_job("cnn", "sgd"),
        PLANS[0],
        buffers=lambda record: {**record.buffers, "norm.running_mean": torch.zeros(4)},
    )
    assert kinds(wrong) == ["batch statistics"] and "norm.running_mean" in wrong.causes[0].sentence


def test_a_loss_that_is_averaged_otherwise_is_named():
    assert kinds(changed(make_job("mlp", "sgd"), PLANS[0], loss=lambda record: record.loss * 2)) == ["loss"]


def shaped(gradients: Any, reference: Reference) -> dict[str, Any]:
    """Flat gradients of few elements each, of which none was left out, as the parameters are."""
    return {
        name: None if each is None else each.view(reference.parameters[name].shape).float()
        for name, each in gradients.items()
    }


def test_statistics_that_are_not_synchronised_are_named():
    job, plan = make_job("cnn", "sgd"), Plan(dp=2, microbatches=2, sync_batch_norm=True)
    separate = Reference(job, plan)
    separate.run()
    own = gradients_of(separate, synchronised=False)
    wrong = hold_against(
        Reference(job, plan), [replace(step_of(Reference(job, plan)), gradients=shaped(own, separate))]
    )
    assert kinds(wrong) == ["batch statistics"]


class Counting(nn.Module):
    """Its training forward reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # type: ignore[operator]
        return self.linear(x) * self.seen


@pytest.mark.long
def test_a_forward_that_reads_what_the_chunk_before_wrote_is_named():
    job, plan = replace(make_job("mlp", "sgd"), model=Counting), PLANS[0]
    separate = Reference(job, plan)
    separate.run()
    chained = gradients_of(separate, chained=True)
    wrong = hold_against(
        Reference(job, plan), [replace(step_of(Reference(job, plan)), gradients=shaped(chained, separate))]
    )
    assert kinds(wrong) == ["buffers"]

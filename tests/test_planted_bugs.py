"""Twelve silent bugs, planted one at a time into the product: verification catches every one and says what it
is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshloom.data.map_data
import meshloom.optimizer.updater
import meshloom.replica.chunk_scope
from meshloom.core.plan import Plan
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.buckets.buckets import Bucket, BucketEntry, GradientBuckets
from meshloom.exchange.buckets.reduction import Exact
from meshloom.exchange.zero import ZeroOne
from meshloom.optimizer.updater import Updater
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.covering import few
from tests.jobs import make_job

Plant = Callable[[pytest.MonkeyPatch, Plan], None]
EXCHANGES: list[Any] = [AllReduce, ZeroOne]


def divide_by(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Let `finish` divide by something else than the total weight."""
    for exchange in EXCHANGES:
        finish = exchange.finish
        monkeypatch.setattr(
            exchange, "finish", lambda self, weight, finish=finish: (yield from finish(self, change(weight)))
        )


def missing_dp(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    divide_by(monkeypatch, lambda weight: weight / plan.dp)


def missing_microbatches(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    divide_by(monkeypatch, lambda weight: weight / plan.microbatches)


def mean_of_means(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Every chunk's gradient is a mean, and the chunks count the same."""
    as_sum = meshloom.replica.loss_sums.as_sum

    def as_mean(loss: Any, samples: int, **settings: Any) -> Any:
        total, weight = as_sum(loss, samples, **settings)
        # the value is right, the gradient is a mean's
        return total / weight + (total - total / weight).detach(), weight

    monkeypatch.setattr(meshloom.replica.loss_sums, "as_sum", as_mean)
    batch = 13
    divide_by(monkeypatch, lambda weight: weight * 0 + plan.num_chunks / (batch if weight == 1 else 1))


def last_microbatch_only(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    ready_of = GradientBuckets._ready_of

    def overwriting(self: GradientBuckets, bucket: Bucket, entry: BucketEntry, view: Tensor) -> Any:
        ready = ready_of(self, bucket, entry, view)

        def overwrite(parameter: Any) -> None:
            entry.arrived = False
            ready(parameter)

        return overwrite

    monkeypatch.setattr(GradientBuckets, "_ready_of", overwriting)


def never_reduced(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    start = AllReduce._start

    def skip_second(self: AllReduce, bucket: Bucket) -> None:
        if bucket is self._buckets.buckets[1]:
            bucket.flat[bucket.length :] = 1.0  # all parameters are used
        else:
            start(self, bucket)

    monkeypatch.setattr(AllReduce, "_start", skip_second)


def reduced_twice(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    finish = Exact.finish

    def again(self: Exact, buckets: Any, divisor: Any) -> Any:
        yield from finish(self, buckets, divisor)
        work = self._sums.all_reduce(buckets[1].flat)
        yield
        work.wait()

    monkeypatch.setattr(Exact, "finish", again)


def clip_before_averaging(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    assert not plan.overlap
    for exchange in EXCHANGES:
        finish = exchange.finish

        def clipped(self: Any, weight: Tensor, finish: Any = finish) -> Any:
            mine = [bucket.flat[: bucket.length] for bucket in self._buckets.buckets]
            norm = torch.cat(mine).norm()
            for each in mine:
                each.mul_((0.25 / norm).clamp(max=1.0))
            return (yield from finish(self, weight))

        monkeypatch.setattr(exchange, "finish", clipped)


def tied_twice(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    ready_of = GradientBuckets._ready_of

    def doubling(self: GradientBuckets, bucket: Bucket, entry: BucketEntry, view: Tensor) -> Any:
        ready = ready_of(self, bucket, entry, view)

        def twice(parameter: Any) -> None:
            parameter.grad *= 2
            ready(parameter)

        return twice if entry.name == "embed.weight" else ready

    monkeypatch.setattr(GradientBuckets, "_ready_of", doubling)


def tied_twice_in_the_norm(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    clip = meshloom.optimizer.updater.clip

    def more(gradients: Any, largest: float, owners: Any, device: Any, **settings: Any) -> Any:
        embedding = next(each for each in gradients if each is not None and each.numel() == 29 * 15)
        norm = yield from clip([*gradients, embedding.clone()], largest, owners, device, **settings)
        return norm

    monkeypatch.setattr(meshloom.optimizer.updater, "clip", more)


def same_masks(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    chunk_seed = meshloom.replica.chunk_scope.chunk_seed
    monkeypatch.setattr(
        meshloom.replica.chunk_scope,
        "chunk_seed",
        lambda seed, step, chunk: chunk_seed(seed, step, chunk % plan.microbatches),
    )


def stale_gradient(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    begin = GradientBuckets.begin_step

    def keep(self: GradientBuckets) -> None:
        arrived = [entry.arrived for bucket in self.buckets for entry in bucket.entries]
        begin(self)
        for entry, was in zip(
            (entry for bucket in self.buckets for entry in bucket.entries), arrived, strict=True
        ):
            entry.arrived = was

    monkeypatch.setattr(GradientBuckets, "begin_step", keep)


def shared_data(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    share_of = meshloom.data.map_data.share_of

    def of_first(replica: int, cuts: Any, plan: Plan) -> Any:
        pairs = zip(share_of(replica, cuts, plan), share_of(0, cuts, plan), strict=True)
        return [replace(first, index=own.index) if replica == 1 else own for own, first in pairs]

    monkeypatch.setattr(meshloom.data.map_data, "share_of", of_first)


def other_state(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """In step 1 every rank uses the optimizer's state that its neighbour had after step 0."""
    update = Updater.update
    ranks: list[Updater] = []
    after_first: dict[int, list[dict[str, Any]]] = {}

    def entries(of: Updater) -> list[dict[str, Any]]:
        everything = [
            optimizer.state.get(each)
            for optimizer in of._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        ]
        return [state for state in everything if state]  # an unused parameter has none

    def swapped(self: Updater, gradients: Any, loss: float, **settings: Any) -> Any:
        first = self not in ranks
        if first:
            ranks.append(self)
        elif len(after_first) == plan.dp:
            neighbour = after_first[(ranks.index(self) + 1) % plan.dp]
            for mine, theirs in zip(entries(self), neighbour, strict=False):
                for key, value in mine.items():
                    if isinstance(value, Tensor) and value.ndim:
                        mine[key] = (
                            theirs[key]
                            .reshape(-1)
                            .repeat(value.numel())[: value.numel()]
                            .reshape(value.shape)
                            .clone()
                        )
        result = yield from update(self, gradients, loss, **settings)
        if first:
            after_first[ranks.index(self)] = copy.deepcopy(entries(self))
        return result

    monkeypatch.setattr(Updater, "update", swapped)


def run(model: str, optimizer: str, plan: Plan) -> Report:
    report = verify(make_job(model, optimizer, batch_size=13), plan, devices="simulated", steps=2)
    assert report
    return report


TWO = Plan(dp=2, microbatches=3, bucket_bytes=300)
THREE = Plan(dp=3, microbatches=2, bucket_bytes=300)
ZERO = Plan(dp=2, microbatches=3, bucket_bytes=300, zero=1)
MLP, CNN, GPT, ODD = ("mlp", "sgd"), ("cnn", "adamw"), ("gpt", "sgd"), ("unused_twice", "adamw")

BUGS: list[tuple[Plant, str, list[tuple[tuple[str, str], Plan]]]] = [
    (missing_dp, "scale", [(MLP, TWO), (CNN, THREE), (GPT, ZERO), (ODD, TWO)]),
    (missing_microbatches, "scale", [(MLP, TWO), (CNN, THREE), (GPT, ZERO), (ODD, TWO)]),
    (mean_of_means, "mean of means", [(MLP, TWO), (CNN, THREE), (GPT, ZERO), (ODD, TWO)]),
    (last_microbatch_only, "microbatches", [(MLP, TWO), (CNN, THREE), (GPT, ZERO), (ODD, TWO)]),
    (never_reduced, "not reduced", [(MLP, TWO), (CNN, THREE), (GPT, TWO), (ODD, THREE)]),
    (reduced_twice, "reduced twice", [(MLP, TWO), (CNN, THREE), (GPT, TWO), (ODD, THREE)]),
    (
        clip_before_averaging,
        "clipping",
        [
            (MLP, replace(TWO, overlap=False)),
            (("cnn", "sgd"), replace(THREE, overlap=False)),
            (GPT, replace(ZERO, overlap=False)),
        ],
    ),
    (tied_twice, "tied", [(GPT, TWO), (("gpt", "adamw"), ZERO), (("gpt", "muon"), THREE)]),
    (tied_twice_in_the_norm, "tied", [(GPT, TWO), (GPT, THREE)]),
    (same_masks, "same draws", [(CNN, TWO), (GPT, THREE), (("gpt", "adamw"), ZERO)]),
    (stale_gradient, "stale", [(MLP, TWO), (CNN, THREE), (GPT, ZERO), (ODD, TWO)]),
    (shared_data, "data", [(MLP, TWO), (CNN, THREE), (GPT, ZERO), (ODD, TWO)]),
    (other_state, "optimizer", [(MLP, ZERO), (CNN, ZERO), (("gpt", "adamw"), ZERO), (ODD, ZERO)]),
]
CASES = [
    pytest.param(
        plant,
        kind,
        *job,
        plan,
        id=f"{plant.__name__}-{'-'.join(job)}-{plan}",
        marks=[pytest.mark.slow if number > 1 else pytest.mark.long] if number else [],
    )
    for plant, kind, cases in BUGS
    for number, (job, plan) in enumerate(cases)
]


@pytest.mark.long
@pytest.mark.covering(
    "mlp-sgd", "tied_twice-gpt-sgd", "tied_twice_in_the_norm-gpt-sgd-dp=2", "same_masks-cnn"
)
@pytest.mark.parametrize(("plant", "kind", "model", "optimizer", "plan"), few(CASES, 4))
def test_a_planted_bug_is_caught_and_named(plant, kind, model, optimizer, plan, monkeypatch):
    plant(monkeypatch, plan)
    report = run(model, optimizer, plan)
    assert not report.passed
    assert [cause.kind for cause in report.causes][:1] == [kind], report.causes


@pytest.mark.covering("cnn-adamw-dp=3", "gpt-adamw", "mlp-sgd-dp=2,microbatches=3,bucket")
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optimizer", "plan"),
    sorted({(*job, plan) for _, _, cases in BUGS for job, plan in cases[:2]}, key=str),
    ids=str,
)
def test_without_a_bug_the_same_runs_pass(model, optimizer, plan):
    report = run(model, optimizer, plan)
    assert report.passed and not report.causes, report.causes

"""Silent bugs around the steps of a run, planted one at a time into the product: in evaluations, checkpoints, resuming, the order
of data, draws and the loop. Verification catches each, and says where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshloom.data.map_data
import meshloom.optimizer.optimizer_state
import meshloom.replica.chunk_scope
import meshloom.replica.metrics
import meshloom.train.run_checkpoints
import meshloom.verify.reference.between_steps.positions
import meshloom.verify.reference.chunk_run
from meshloom.core.job import Evaluate, Job
from meshloom.core.moments.modes import Modes
from meshloom.core.plan import Plan
from meshloom.core.random import chunk_seed, sample_order
from meshloom.exchange.all_reduce import AllReduce
from meshloom.optimizer.updater import Updater
from meshloom.parameters.shards import Shards
from meshloom.replica.metrics import MetricSums
from meshloom.train.synchronous import SynchronousRun
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import make_job

Plant = Callable[[pytest.MonkeyPatch], None]


def evaluated_in_training_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Modes, "evaluation", lambda self: nullcontext())


def left_in_evaluation_mode(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def left(self: Modes) -> Iterator[None]:
        self._model.eval()
        yield

    patch.setattr(Modes, "evaluation", left)
    patch.setattr(Modes, "training", lambda self: nullcontext())


def metrics_of_equal_weight(patch: pytest.MonkeyPatch) -> None:
    add = MetricSums.add

    def unweighted(self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        add(self, name, replace(chunk, samples=1), returned)

    patch.setattr(MetricSums, "add", unweighted)


def last_evaluation_batch_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.data.map_data.map_chunks
    patch.setattr(
        "meshloom.data.job_data.map_chunks",
        lambda dataset, job, plan, replica, shares, batches: right(
            dataset, job, plan, replica, shares, batches or 2
        ),
    )


def evaluation_moves_a_parameter(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.replica.metrics._evaluate

    def moving(replica: Any, chunks: Any, updates: int, *rest: Any) -> Any:
        values = yield from right(replica, chunks, updates, *rest)
        if updates:
            with torch.no_grad():
                next(replica.model.parameters()).mul_(1.001)
        return values

    patch.setattr(meshloom.replica.metrics, "_evaluate", moving)


def momentum_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.optimizer.optimizer_state.state_pieces

    def zeros(*arguments: Any, **settings: Any) -> Any:
        pieces, parts = right(*arguments, **settings)
        return [
            replace(each, tensor=torch.zeros_like(each.tensor)) if each.tensor.numel() > 1 else each
            for each in pieces
        ], parts

    patch.setattr(meshloom.optimizer.optimizer_state, "state_pieces", zeros)


def weights_are_saved_rounded(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.train.run_checkpoints.held_weights

    def rounded(replica: Any) -> Any:
        return [
            replace(each, tensor=each.tensor.bfloat16().to(each.tensor.dtype))
            if each.tensor.is_floating_point()
            else each
            for each in right(replica)
        ]

    patch.setattr(meshloom.train.run_checkpoints, "held_weights", rounded)


def momentum_is_not_loaded(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.optimizer.optimizer_state.state_loader

    def without(*arguments: Any, **settings: Any) -> Any:
        take = right(*arguments, **settings)
        return lambda key, shape, read: None if key.endswith("exp_avg") else take(key, shape, read)

    def zero(optimizer: Any, before: Any = torch.optim.AdamW.step) -> Any:
        for group in optimizer.param_groups:
            for each in group["params"]:
                if optimizer.state.get(each) and "exp_avg" not in optimizer.state[each]:
                    optimizer.state[each]["exp_avg"] = torch.zeros_like(each)
        return before(optimizer)

    patch.setattr(meshloom.optimizer.optimizer_state, "state_loader", without)
    patch.setattr(torch.optim.AdamW, "step", zero)


def schedule_begins_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.optim.lr_scheduler.LRScheduler, "load_state_dict", lambda self, state: None)
    patch.setattr(
        torch.optim.lr_scheduler.LambdaLR, "load_state_dict", lambda self, state: None, raising=False
    )


def weights_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shards, "weights_loader", lambda self, model: lambda name, whole: None)


def data_goes_on_one_step_later(patch: pytest.MonkeyPatch) -> None:
    resume = SynchronousRun._resume

    def later(self: SynchronousRun, directory: Any) -> None:
        resume(self, directory)
        self.next_step += 1

    patch.setattr(SynchronousRun, "_resume", later)


def every_epoch_is_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        meshloom.data.map_data,
        "sample_order",
        lambda seed, epoch, samples, shuffle: sample_order(seed, 0, samples, shuffle),
    )


def orders_are_alike_on_both_sides(patch: pytest.MonkeyPatch) -> None:
    def first(seed: int, epoch: int, samples: int, shuffle: bool) -> list[int]:
        return sample_order(seed, 0, samples, shuffle)

    patch.setattr(meshloom.data.map_data, "sample_order", first)
    patch.setattr("meshloom.verify.reference.samples_of_epoch.sample_order", first)
    patch.setattr(meshloom.verify.reference.between_steps.positions, "sample_order", first)


def masks_are_those_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        meshloom.replica.chunk_scope, "chunk_seed", lambda seed, step, chunk: chunk_seed(seed, 0, chunk)
    )


def masks_are_alike_on_both_sides(patch: pytest.MonkeyPatch) -> None:
    def first(seed: int, step: int, chunk: int) -> int:
        return chunk_seed(seed, 0, chunk)

    patch.setattr(meshloom.replica.chunk_scope, "chunk_seed", first)
    patch.setattr(meshloom.verify.reference.chunk_run, "chunk_seed", first)
    patch.setattr(meshloom.verify.reference.between_steps.positions, "chunk_seed", first)


def a_draw_too_many(patch: pytest.MonkeyPatch) -> None:
    seed_torch = meshloom.replica.chunk_scope.seed_torch

    def moved(seed: int) -> None:
        seed_torch(seed)
        torch.rand(1)

    patch.setattr(meshloom.replica.chunk_scope, "seed_torch", moved)


def updated_twice(patch: pytest.MonkeyPatch) -> None:
    update = Updater.update

    def twice(self: Updater, gradients: Any, loss: float, **settings: Any) -> Any:
        yield from update(self, gradients, loss, **settings)
        return (yield from update(self, gradients, loss, **settings))

    patch.setattr(Updater, "update", twice)


def never_updated_from_the_second_step(patch: pytest.MonkeyPatch) -> None:
    update = Updater.update
    counts: dict[int, int] = {}

    def once(self: Updater, gradients: Any, loss: float, **settings: Any) -> Any:
        counts[id(self)] = counts.get(id(self), 0) + 1
        settings["skip"] = counts[id(self)] > 1
        return (yield from update(self, gradients, loss, **settings))

    patch.setattr(Updater, "update", once)


def _after_finish(
    patch: pytest.MonkeyPatch, change: Callable[[AllReduce, list[Tensor | None]], list[Tensor | None]]
) -> None:
    finish = AllReduce.finish

    def changed(self: AllReduce, weight: Any) -> Any:
        gradients = yield from finish(self, weight)
        return change(self, gradients)

    patch.setattr(AllReduce, "finish", changed)


def gradients_are_exchanged(patch: pytest.MonkeyPatch) -> None:
    def swap(exchange: AllReduce, gradients: list[Tensor | None]) -> list[Tensor | None]:
        places = {each.name: number for number, each in enumerate(exchange.owned)}
        a, b = places["norm.weight"], places["norm.bias"]
        gradients[a], gradients[b] = gradients[b], gradients[a]
        return gradients

    _after_finish(patch, swap)


def gradients_are_rounded(patch: pytest.MonkeyPatch) -> None:
    _after_finish(
        patch,
        lambda _, gradients: [each if each is None else each.bfloat16().to(each.dtype) for each in gradients],
    )


def a_tail_is_lost(patch: pytest.MonkeyPatch) -> None:
    def cut(exchange: AllReduce, gradients: list[Tensor | None]) -> list[Tensor | None]:
        for owned, each in zip(exchange.owned, gradients, strict=True):
            if owned.name == "hidden.weight" and each is not None:
                each.view(-1)[-9:] = 0
        return gradients

    _after_finish(patch, cut)


def a_factor_of_two_in_a_hundred_thousand(patch: pytest.MonkeyPatch) -> None:
    _after_finish(
        patch, lambda _, gradients: [each if each is None else each * 1.00002 for each in gradients]
    )


BUGS: list[tuple[Plant, str, str]] = [
    # plant, model and optimizer, what the report says
    (evaluated_in_training_mode, "cnn-adamw", "DIFFERS: the evaluation after step 0"),
    (left_in_evaluation_mode, "cnn-adamw", "The evaluation changes the mode of norm"),
    (metrics_of_equal_weight, "mlp-adamw", "DIFFERS: the evaluation after step 0"),
    (last_evaluation_batch_is_lost, "mlp-adamw", "DIFFERS: the evaluation after step 0"),
    (evaluation_moves_a_parameter, "mlp-adamw", "The evaluation changes first.weight"),
    (momentum_is_not_saved, "mlp-adamw", "exp_avg of first.weight differs"),
    (weights_are_saved_rounded, "mlp-adamw", "DIFFERS: the checkpoint after step 0"),
    (momentum_is_not_loaded, "mlp-adamw", "the first one after resuming does not"),
    (schedule_begins_anew, "mlp-adamw", "the first one after resuming does not"),
    (weights_are_not_loaded, "mlp-adamw", "the first one after resuming does not"),
    (data_goes_on_one_step_later, "mlp-adamw", "other samples than one device reads"),
    (every_epoch_is_the_first, "mlp-adamw", "the end of the epoch does not"),
    (orders_are_alike_on_both_sides, "mlp-adamw", "Two epochs have the same order"),
    (masks_are_those_of_the_first_step, "cnn-adamw", "whose seed they have"),
    (masks_are_alike_on_both_sides, "cnn-adamw", "have one seed, on one device too"),
    (a_draw_too_many, "cnn-adamw", "other random draws than on one device"),
    (updated_twice, "mlp-sgd", "clipped already, or a second time"),
    (never_updated_from_the_second_step, "mlp-adamw", "these parameters are not updated"),
    (gradients_are_exchanged, "cnn-adamw", "that of norm.weight is norm.bias's"),
    (gradients_are_rounded, "cnn-adamw", "rounding to bfloat16 on the way"),
    (a_factor_of_two_in_a_hundred_thousand, "cnn-adamw", "are 1.00002 times one device's"),
    (a_tail_is_lost, "cnn-adamw", "of hidden.weight differs and are zero"),
]
QUICK = {left_in_evaluation_mode, momentum_is_not_saved, schedule_begins_anew, every_epoch_is_the_first}
CASES = [
    pytest.param(plant, job, said, id=plant.__name__, marks=[] if plant in QUICK else [pytest.mark.slow])
    for plant, job, said in BUGS
]


def job_of(name: str) -> Job:
    model, optimizer = name.split("-")
    job = make_job(model, optimizer, batch_size=13, steps=40)
    metrics = {"loss": lambda model, batch: job.loss(model, batch)}
    return replace(job, evaluate=Evaluate(data=job.data, metrics=metrics, every=2))


def whole(name: str, plan: str = "dp=2,microbatches=2", dtype: torch.dtype | None = None) -> Report:
    report = verify(job_of(name), Plan.parse(plan), devices="simulated", dtype=dtype, quick=False)
    assert report
    return report


@pytest.mark.long
@pytest.mark.parametrize(("plant", "name", "said"), CASES)
def test_a_planted_bug_is_caught_and_placed(
    plant: Plant, name: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    from tests.test_verify import text

    plant(monkeypatch)
    report = whole(name)
    assert not report.passed
    assert said in " ".join(text(report).split()), text(report)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plan", "dtype"),
    [
        ("cnn-adamw", "dp=2,microbatches=2", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("mlp-sgd", "tp=2", None),
                ("mlp-adamw", "pp=2,microbatches=3", torch.float64),
                ("cnn-muon", "dp=2,zero=3", None),
                ("gpt-adafactor", "dp=2,zero=1", torch.float64),
                ("cnn-sgd", "dp=3,sync_batch_norm=true", None),
                ("cnn-adamw", "dp=2,precision=bf16-mixed", None),
                ("mlp-adamw", "dp=2,precision=bf16", None),
            ]
        ),
    ],
)
def test_without_a_bug_everything_around_the_steps_agrees(name: str, plan: str, dtype: torch.dtype | None):
    report = whole(name, plan, dtype)
    assert report.passed, [each for each in report.between if not each.passed]
    assert [each.what.split(" after")[0] for each in report.between][:2] == [
        "the evaluation",
        "the checkpoint",
    ]
    assert any(each.what.startswith("the next checkpoint of the run that was resumed") for each in report.between)  # fmt: skip
    # an epoch has three batches, of 13, 13 and 4; the end of the first one lies between two stretches
    assert [step.step for step in report.steps] == [0, 1, 2, 5, 6]


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2,zero=1", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_what_is_verified_has_the_digest_of_what_trains_in_any_precision(plan: str):
    from meshloom.telemetry.progress import QUIET
    from meshloom.train.trainer import Trainer

    job = make_job("mlp", "adamw")
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        assert trainer.synchronous
        trained = trainer.synchronous.digest
    digests = [
        report.digest
        for dtype in (None, torch.float64)
        if (report := verify(job, Plan.parse(plan), devices="simulated", dtype=dtype, steps=1))
    ]
    assert digests == [trained, trained]
    assert trained != verify(job, Plan.parse("dp=2"), devices="simulated", steps=1).digest  # type: ignore[union-attr]

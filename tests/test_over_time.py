"""Accumulation and schedules by hand are the obvious loop on one device, under every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

import meshloom as ml
from meshloom.checkpoint.checkpoint import find
from meshloom.core.job import Job
from meshloom.core.random import sample_order
from meshloom.telemetry.progress import Listener
from meshloom.verify.reference.samples_of_epoch import batches_of_first_epoch
from tests.jobs import MLP, Samples, class_loss, vectors
from tests.verified import equals_one_device

pytestmark = pytest.mark.long

TP = "tp=2,tp_placements=first:column+second:row"  # the model is too small to be divided for speed
PP = "pp=2,microbatches=2"
PLANS = ["dp=2,zero=1", TP, PP, "dp=2,zero=3", f"dp=2,{TP},zero=1"]
QUIET = Listener(started=str, note=str)
SEED, STEPS = 0, 6


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.05, weight_decay=0.5)


def job(**overrides: Any) -> Job:
    settings: dict[str, Any] = {
        "model": MLP, "loss": class_loss, "optimizer": adamw, "data": vectors, "batch_size": 12, "clip_grad_norm": 0.5, "steps": STEPS,
    }  # fmt: skip
    return Job(**{**settings, **overrides})


def batches(*, drop_last: bool = False) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch, whole batches of 12 samples."""
    data, epoch = vectors(), 0
    while True:
        order = sample_order(SEED, epoch, len(data), True)
        while order:
            indices, order = order[:12], order[12:]
            if len(indices) == 12 or not drop_last:
                yield default_collate([data[index] for index in indices])
        epoch += 1


def loop(
    job: Job,
    data: Iterator[dict[str, Tensor]],
    before: Callable[[int, nn.Module, Any], None] = lambda step, model, optimizer: None,
    loss: Callable[[Any, Any], Tensor] = class_loss,
) -> dict[str, Tensor]:
    """The parameters that the plain loop ends with."""
    with ml.Trainer(job, listener=QUIET) as trainer:
        model: Any = MLP()
        model.load_state_dict(trainer.replicas[0].model.state_dict())
    optimizer: Any = job.optimizer([*model.named_parameters()])
    for step in range(job.steps):
        before(step, model, optimizer)
        optimizer.zero_grad()
        loss(model, next(data)).backward()
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
    return dict(model.named_parameters())


def trained(job: Job, plan: str, out: Path, stop: int | None = None, then: str = "") -> dict[str, Tensor]:
    """What the run ends with. stop: after as many steps it is resumed from its checkpoint, under plan `then`."""
    if stop is not None:
        with ml.Trainer(job, plan, steps=stop, out=out, listener=QUIET) as trainer:
            trainer.fit()
    resume = None if stop is None else out
    with ml.Trainer(job, then or plan, out=out, listener=QUIET, resume=resume) as trainer:
        summary = trainer.fit()
        assert summary.predicted.bytes == summary.counted.bytes
    return load_file(find(out) / "model.safetensors")


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        # sum order: ranks and chunks; AdamW divides by roots of small numbers
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-6)


def set_rates(step: int, model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.02 * (step + 1), 0.1 * step


def by_hand_job(**overrides: Any) -> Job:
    return job(scheduler=lambda made: lambda step: set_rates(step, made, made), **overrides)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_a_run_is_the_plain_loop(plan: str, tmp_path: Path):
    check_equal(trained(by_hand_job(), plan, tmp_path), loop(by_hand_job(), batches(), set_rates))


@pytest.mark.slow
def test_a_resumed_run_goes_on_under_another_plan(tmp_path: Path):
    found = trained(by_hand_job(), "dp=2,zero=1", tmp_path, 2, PP)
    check_equal(found, loop(by_hand_job(), batches(), set_rates))


@pytest.mark.parametrize("plan", ["dp=2", TP, PP])
@pytest.mark.slow
def test_verify_finds_them_equal(plan: str):
    equals_one_device(by_hand_job(), plan, steps=3, dtype=None)


class Stream(IterableDataset[dict[str, Tensor]]):
    """The vectors, in the order of each epoch."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data: Samples = vectors()
        return (data[index] for index in sample_order(SEED, self._epoch, len(data), True))


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_of_a_stream_ends_where_its_batches_do(drop_last: bool) -> None:
    made = job(data=Stream, drop_last=drop_last)
    assert batches_of_first_epoch(made, 100, 60.0) == (2 if drop_last else 3)
    assert batches_of_first_epoch(made, 20, 60.0) is None


@pytest.mark.parametrize("plan", ["microbatches=3", "dp=2,microbatches=3,zero=2"])
def test_accumulation_over_batches_of_a_loader_is_one_larger_batch_in_microbatches(plan: str, tmp_path: Path):
    """Three batches of 4 a step: `(loss / 3).backward()` of each."""

    def accumulated(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        parts: Sequence[dict[str, Tensor]] = [
            {name: value[start : start + 4] for name, value in batch.items()} for start in range(0, 12, 4)
        ]
        return torch.stack([class_loss(model, each) / 3 for each in parts]).sum()

    whole = job(drop_last=True)
    check_equal(
        trained(whole, plan, tmp_path),
        loop(whole, batches(drop_last=True), loss=accumulated),
    )

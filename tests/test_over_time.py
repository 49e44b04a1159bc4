"""What changes over the steps of a run: frozen parameters, accumulation, schedules by hand. Each is
the obvious loop on one device, under every plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

import meshloom as ml
from meshloom.checkpoint.checkpoint import find
from meshloom.core.errors import JobError, PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import sample_order
from meshloom.telemetry.progress import Listener
from meshloom.verify.reference.samples_of_epoch import batches_of_first_epoch
from meshloom.verify.run import verify
from tests.jobs import MLP, Samples, class_loss, make_job, vectors

pytestmark = pytest.mark.long

TP = "tp=2,tp_placements=first:column+second:row"  # the model is too small to be divided for speed
PP = "pp=2,microbatches=2"
QUICK = {("frozen", "dp=2,zero=1"), ("frozen", TP), ("frozen", PP), ("by hand", "dp=2,zero=1")}  # fmt: skip
PLANS = ["dp=2,zero=1", TP, PP, "dp=1", "dp=2", "dp=3,microbatches=2,zero=2", "dp=2,zero=3", f"dp=2,{TP},zero=1", "dp=2,pp=2,offload=optimizer"]  # fmt: skip
QUIET = Listener(started=str, note=str)
SEED, STEPS = 0, 6


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.05, weight_decay=0.5)


def job(**overrides: Any) -> Job:
    settings: dict[str, Any] = {
        "model": MLP, "loss": class_loss, "optimizer": adamw, "data": vectors, "batch_size": 12, "clip_grad_norm": 0.5, "steps": STEPS,
    }  # fmt: skip
    return Job(**{**settings, **overrides})


def batches(sizes: Callable[[int], int], *, drop_last: bool = False) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch, whole batches of as many samples as each step has."""
    data, step, epoch = vectors(), 0, 0
    while True:
        order = sample_order(SEED, epoch, len(data), True)
        while order:
            size = sizes(step)
            indices, order = order[:size], order[size:]
            if len(indices) == size or not drop_last:
                yield default_collate([data[index] for index in indices])
                step += 1
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


def freeze(step: int, model: nn.Module, optimizer: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not ((name.startswith("first.") and step < 2) or (name == "second.bias" and step >= 3)))  # fmt: skip


def frozen_job(**overrides: Any) -> Job:
    return job(frozen={"first": range(2), "second.bias": range(3, 100)}, **overrides)


def set_rates(step: int, model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.02 * (step + 1), 0.1 * step


def by_hand_job(**overrides: Any) -> Job:
    return job(scheduler=lambda made: lambda step: set_rates(step, made, made), **overrides)


JOBS: dict[str, tuple[Callable[..., Job], Callable[[Job], dict[str, Tensor]]]] = {
    "frozen": (frozen_job, lambda job: loop(job, batches(lambda step: 12), freeze)),
    "by hand": (by_hand_job, lambda job: loop(job, batches(lambda step: 12), set_rates)),
}


def slow_unless(quick: Collection[tuple[str, str]], plans: Sequence[str]) -> list[Any]:
    """Every kind of job under each of the plans."""
    pairs = [(kind, plan) for kind in JOBS for plan in plans]
    return [pair if pair in quick else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.covering("frozen-dp=2", "frozen-pp=2", "by hand")
@pytest.mark.parametrize(("kind", "plan"), slow_unless(QUICK, PLANS))
@pytest.mark.slow
def test_a_run_is_the_plain_loop(kind: str, plan: str, tmp_path: Path):
    make, expected = JOBS[kind]
    check_equal(trained(make(), plan, tmp_path), expected(make()))


@pytest.mark.covering("frozen")
@pytest.mark.parametrize(("kind", "plan"), slow_unless({("frozen", PP)}, [PP]))
@pytest.mark.slow
def test_a_resumed_run_goes_on_under_another_plan(kind: str, plan: str, tmp_path: Path):
    """In the middle of what changes: the first layer has no optimizer state yet, the batch has its second size."""
    make, expected = JOBS[kind]
    check_equal(trained(make(), "dp=2,zero=1", tmp_path, 2, plan), expected(make()))


@pytest.mark.parametrize(("kind", "plan"), slow_unless({("frozen", TP)}, ["dp=2", TP, PP]))
@pytest.mark.long
def test_verify_finds_them_equal(kind: str, plan: str):
    report = verify(JOBS[kind][0](), Plan.parse(plan), devices="simulated")
    assert report is not None and report.passed


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,zero=1,pp=2", "dp=2,zero=3,recompute=full"])
def test_verify_of_owners_of_parts_says_nothing_of_what_is_frozen(plan: str):
    """Programs compute the gradients of what is frozen; owners had none, and zeros were compared."""
    report = verify(frozen_job(), Plan.parse(plan), devices="simulated", steps=2)
    assert report is not None and report.passed, report and report.worst()


@pytest.mark.covering("dp=2")
@pytest.mark.parametrize("plan", ["dp=2", TP])
@pytest.mark.long
def test_verify_sees_a_frozen_parameter_that_is_trained(plan: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.core.losses.frozen.FrozenParameters.at", lambda self, step: set())
    report = verify(frozen_job(), Plan.parse(plan), devices="simulated")
    assert report is not None and not report.passed


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_parameters_leave_frozen_ones_alone(optimizer: str, tmp_path: Path):
    small = make_job("mlp", optimizer, frozen={"first.weight": range(2)}, steps=3)
    found = [trained(small, plan, tmp_path / str(number)) for number, plan in enumerate(["dp=1", f"dp=2,zero=1,{TP}"])]  # fmt: skip
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)  # Muon's iterations round


@pytest.mark.long
def test_a_frozen_parameter_is_not_touched_and_has_no_state(tmp_path: Path):
    frozen = job(frozen={"first": range(3)}, steps=4)
    with ml.Trainer(frozen, "dp=2,zero=1", listener=QUIET) as trainer:
        replica = trainer.replicas[0]
        before = {name: each.detach().clone() for name, each in replica.model.named_parameters()}
        for step, batch in enumerate(trainer.batches()):
            trainer.step(batch)
            same = torch.equal(before["first.weight"], replica.model.state_dict()["first.weight"])
            assert same == (step < 3)
            assert not torch.equal(before["second.weight"], replica.model.state_dict()["second.weight"])


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
@pytest.mark.long
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
        loop(whole, batches(lambda step: 12, drop_last=True), loss=accumulated),
    )


@pytest.mark.slow
def test_several_losses_freeze_their_parameters(tmp_path: Path):
    def objective(**overrides: Any) -> ml.Objective:
        return ml.Objective(loss=class_loss, optimizer=adamw, **overrides)

    losses = {"one": objective(parameters="first")}
    rest: dict[str, Any] = {"model": MLP, "data": vectors, "batch_size": 12, "steps": 4}
    losses["two"] = objective(parameters=["second", "head"])
    several = Job(losses=losses, frozen={"first.bias": range(2)}, **rest)
    for plan in ("dp=2", TP):
        report = verify(several, Plan.parse(plan), devices="simulated")
        assert report is not None and report.passed
    with pytest.raises(JobError, match="leaves nothing to train in step 1: .* of loss 'one'"):
        ml.Trainer(Job(losses=losses, frozen={"first": range(1, 2)}, **rest), listener=QUIET)


def test_mistakes_are_one_sentence():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"frozen": {"first": 100}}, r"ranges of steps by the name"),
    ]
    for settings, message in wrong:
        with pytest.raises(JobError, match=message):
            job(**settings)
    with pytest.raises(JobError, match=r"names 'third', which is none of the model's 6 trainable"):
        ml.Trainer(job(frozen={"third": range(3)}), listener=QUIET)
    with pytest.raises(JobError, match=r"leaves nothing to train in step 2"):
        ml.Trainer(job(frozen={"*": range(2, 3)}), listener=QUIET)
    with pytest.raises(PlanError, match=r"Job\(frozen=...\) is for steps that ranks take together"):
        ml.Trainer(frozen_job(), "dp=2,exchange=async", listener=QUIET)

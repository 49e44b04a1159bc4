"""One copy of the parameters for real processes: equal to one device, as small as it should be, never torn in
a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshloom.checkpoint.checkpoint import Checkpoint, find
from meshloom.comm.shm.native_engine import why_not
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.windows import windows_of
from meshloom.core.errors import PeerLostError
from meshloom.core.plan import Plan
from meshloom.exchange.shared import OneForAll
from meshloom.exchange.zero import ZeroOne
from meshloom.optimizer.updater import Updater
from meshloom.replica.replica_state import check_identical
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.exchange_world import Net, backward, data, watch
from tests.jobs import GPT, make_job
from tests.processes import on_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]
QUIET = Listener(started=lambda text: None)
FEW = ["dp=2,bucket_bytes=600", "dp=2,zero=1,microbatches=2,bucket_bytes=600"]
MANY = ["dp=4,bucket_bytes=600", "dp=2,pp=2,microbatches=2", "dp=2,tp=2"]


def through_memory(trainer: Trainer) -> bool:
    return windows_of(trainer.replicas[0].replicas) is not None


def _group() -> ShmGroup:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False, timeout=timedelta(seconds=30)
    )
    return ShmGroup(
        dist.PrefixStore("group", store),
        rank,
        size,
        [f"rank {each}" for each in range(size)],
        timeout=timedelta(seconds=30),
    )


def _parameters_after(steps: int, bucket_bytes: int, bug: str) -> list[torch.Tensor]:
    """Of SGD with one copy over the group, every rank having two chunks of its own."""
    group = _group()
    late = bug == "no meeting" and group.rank == 0
    torch.manual_seed(0)
    model = Net().double()
    exchange = ZeroOne(
        list(model.named_parameters()), group, bucket_bytes=bucket_bytes, overlap=True, windows=group,
        copies=lambda buckets, _: OneForAll(buckets, group, group),
    )  # fmt: skip
    watch(model, exchange)
    group.barrier().wait()
    chunks = data(*range(3, 3 + 2 * group.size))
    for _ in range(steps):
        backward(model, exchange, chunks[2 * group.rank : 2 * group.rank + 2])
        gradients = exchange.finish(float(sum(map(len, chunks))))
        time.sleep(0.2 if late else 0)
        for slice_, gradient in zip(exchange.ownership.owned, gradients, strict=True):
            if gradient is not None:
                slice_.data().sub_(gradient, alpha=0.01)
        if bug != "no meeting":
            exchange.publish()
    group.barrier().wait()
    made = [each.detach().clone() for each in model.parameters()]
    group.barrier().wait()
    group.close()
    return made


@pytest.mark.parametrize(("size", "bucket_bytes"), [(2, 200), (3, 1), (4, 10**9)])
def test_many_steps_are_those_of_a_plain_loop(size: int, bucket_bytes: int) -> None:
    _compare(size, 20, bucket_bytes, "")


def test_reading_before_all_have_updated_is_seen() -> None:
    with pytest.raises(AssertionError, match="not close|not equal|outside the optimizer"):
        _compare(2, 3, 200, "no meeting")


def _compare(size: int, steps: int, bucket_bytes: int, bug: str) -> None:
    results = on_ranks(_parameters_after, size, steps, bucket_bytes, bug)
    torch.manual_seed(0)
    model = Net().double()
    chunks = data(*range(3, 3 + 2 * size))
    for _ in range(steps):
        model.zero_grad()
        for chunk in chunks:
            (model(chunk).square().sum() / sum(map(len, chunks))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01) if parameter.grad is not None else None
    for result in results:
        for found, first, expected in zip(result, results[0], model.parameters(), strict=True):
            # sum order differs, over all steps
            torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-11)
            assert torch.equal(found, first)


def _verified(plan: str, optimizer: str, bug: bool = False) -> str:
    if bug:
        _plant()
    report = verify(
        make_job("gpt", optimizer, clip_grad_norm=0.25),
        Plan.parse(plan),
        devices="cpu",
        steps=3,
        dtype=torch.float64,
    )
    if report is None:
        return ""
    assert max(report.owned) < 0.6, "every rank owns all"
    return "EQUAL" if report.passed else "different"


def _plant() -> None:
    """The gradients of rank 0 are lost."""
    start = ZeroOne._start

    def without_mine(self: ZeroOne, bucket: Any) -> None:
        if self._group.rank == 0:
            bucket.flat.zero_()
        start(self, bucket)

    ZeroOne._start = without_mine  # type: ignore[method-assign]


@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [*FEW, *(pytest.param(plan, marks=pytest.mark.slow) for plan in MANY)])
def test_a_job_equals_one_device(plan: str, optimizer: str) -> None:
    assert (
        on_ranks(_verified, Plan.parse(plan).mesh.size, plan, optimizer, timeout_seconds=120.0)[0] == "EQUAL"
    )


def test_a_planted_bug_is_caught() -> None:
    assert on_ranks(_verified, 2, "dp=2,bucket_bytes=600", "adamw", True)[0] == "different"


def _kept_bytes(share: bool) -> int:
    """What this rank holds of parameters and optimizer state; memory of several ranks by the kernel's
    account."""
    job = make_job("gpt", "adamw")
    with Trainer(_wide(job), "dp=2", devices="cpu", share=share, listener=QUIET) as trainer:
        assert through_memory(trainer)
        trainer.step(next(batches := trainer.batches()))
        batches.close()
        replica = trainer.replicas[0]
        states = [
            each
            for made in replica.updater._optimizers
            for state in made.state.values()
            for each in state.values()
        ]
        kept = sum(each.numel() * each.element_size() for each in states)
        parameters = [each for each in replica.model.parameters() if each.requires_grad]
        kept += _proportional(parameters[0].data_ptr()) if share else sum(each.nbytes for each in parameters)
        trainer.together(lambda each: check_identical(each, 0))  # nobody lets go before all have counted
        return kept


def _wide(job: Any) -> Any:
    return replace(job, model=lambda: GPT(width=150))


def _proportional(address: int) -> int:
    """Pss in bytes of the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start, stop = (int(word, 16) for word in words[0].split("-"))
            inside = start <= address < stop
        elif inside and words[0] == "Pss:":
            return 1024 * int(words[1])
    raise AssertionError("nothing is mapped there")


def test_two_replicas_hold_parameters_and_state_once() -> None:
    shared, separate = (sum(on_ranks(_kept_bytes, 2, share)) for share in (True, False))
    assert shared <= 1.15 * separate / 2


def _dies_in_its_update(directory: str) -> str:
    update, rank = Updater.update, int(os.environ["RANK"])

    def dies(self: Updater, gradients: Any, loss: float, **settings: Any) -> Any:
        if trainer.next_step == 3 and rank == 1:
            for slice_ in self._ownership.owned[:1]:
                slice_.data().fill_(float("nan"))
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, gradients, loss, **settings)

    Updater.update = dies  # type: ignore[method-assign]
    with Trainer(
        make_job("gpt", "adamw", steps=5, checkpoint_every=1),
        "dp=3",
        devices="cpu",
        share=True,
        out=directory,
        listener=QUIET,
    ) as trainer:
        try:
            trainer.fit()
        except PeerLostError as error:
            return str(error)
    return "nothing was wrong"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_dies_in_its_update_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    first, _, last = on_ranks(_dies_in_its_update, 3, str(tmp_path), may_die=[1])
    assert "rank 1" in first and "rank 1" in last
    checkpoint = Checkpoint.open(find(tmp_path))
    assert checkpoint.step == 3
    assert all(bool(torch.isfinite(each).all()) for each in checkpoint.weights().values())


class Writing(nn.Module):
    """[batch, 7] -> [batch, 5]; writes its weight in every forward but the first."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards > 1:
            self.head.weight.data.mul_(0.5)
        return self.head(x)


def _writes(model: type[nn.Module], share: bool) -> str:
    job = replace(make_job("mlp", "sgd"), model=model)
    try:
        with Trainer(job, "dp=2,microbatches=2", devices="cpu", share=share, listener=QUIET) as trainer:
            trainer.fit()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("share", [True, False])
def test_a_forward_that_writes_has_a_copy_on_every_replica(share: bool) -> None:
    """Also in a step's second microbatch, and by `.data`, which only values show."""
    assert on_ranks(_writes, 2, Writing, share) == ["", ""]

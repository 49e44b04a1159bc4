"""Optimizer state in host memory, beside parameters on a device: what is copied, when, and where it lies.

The device is this machine's memory, and its lanes are those of tests: one copies at once, the other as late as it may.
A copy that nobody waited for, or memory that is used again too early, gives other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from meshloom.core.device.lanes import DirectLane, Lane, Wait, lane_of
from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.optimizer import updater
from meshloom.optimizer.offload import host
from meshloom.optimizer.offload.host import StateOnHost
from meshloom.optimizer.offload.offloaded_state import OffloadedState
from meshloom.replica.replica_state import full_state
from meshloom.train import memory_check
from meshloom.train.trainer import Trainer
from tests.covering import few
from tests.offload_jobs import job_with, offload_job, tensor_files

CPU = torch.device("cpu")


class LateLane(Lane):
    """Copies when somebody waits for it, and not before."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.queue.append((target, source))

    def mark(self) -> Wait:
        here = len(self.queue)
        return lambda: self._run(here)

    def after_computation(self) -> None:
        pass

    def before_computation(self) -> None:
        self._run(len(self.queue))

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _run(self, until: int) -> None:
        for target, source in self.queue[self.done : until]:
            target.copy_(source)
        self.done = max(self.done, until)


def on_host(monkeypatch: pytest.MonkeyPatch, lane: type[Lane], window_bytes: int = 100) -> list[StateOnHost]:
    """State is kept as beside a GPU from now on."""
    made: list[StateOnHost] = []

    def instead(
        optimizers: Sequence[Optimizer], in_windows: Sequence[bool], _: torch.device
    ) -> OffloadedState:
        made.append(StateOnHost(optimizers, in_windows, CPU, lane(), lane()))
        return made[-1]

    monkeypatch.setattr(host, "WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(updater, "offload_state", instead)
    return made


def ran(job: Any, plan: str, **settings: Any) -> dict[str, Tensor]:
    with Trainer(job, plan, devices="simulated", **settings) as trainer:
        trainer.fit()
        return trainer.together(full_state)[0]


CASES = [
    ("mlp", "groups", "dp=1"),
    ("mlp", "sgd", "dp=2,zero=1"),
    ("unused_twice", "adagrad", "dp=2,zero=1"),
    ("mlp", "muon", "dp=2,zero=3"),
    ("gpt", "adafactor", "tp=2"),
    ("mlp", "fused", "dp=2,exchange=local_sgd,local_steps=2"),
    ("cnn", "amsgrad", "dp=2,exchange=server"),
    ("mlp", "foreach", "pp=2,microbatches=2"),
    ("mlp", "muon", "dp=2,tp=2,zero=1"),
]


@pytest.fixture(autouse=True)
def _on_cpus(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("it is about ranks on CPUs; benchmarks/gpu has a part for GPUs")


@pytest.mark.parametrize("lane", few([LateLane, DirectLane], 1, pytest.mark.slow))
@pytest.mark.parametrize(("model", "optimizer", "plan"), few(CASES, 3, pytest.mark.slow))
@pytest.mark.long
def test_bits_are_those_of_the_plan_without_it(
    model: str, optimizer: str, plan: str, lane: type[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ran(offload_job(model, optimizer), plan)
    states = on_host(monkeypatch, lane)
    with_it = ran(offload_job(model, optimizer), f"{plan},offload=optimizer")
    assert all(torch.equal(with_it[name], each) for name, each in without.items())
    assert any(len(windows) > 1 for state in states for windows in state._windows.values())


def test_twins_have_memory_in_an_update_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host holds state, and room for two windows."""
    (states, job) = on_host(monkeypatch, LateLane), offload_job("mlp", "amsgrad")
    theirs = ran(job, "dp=1")
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated") as trainer:
        trainer.fit()
        (optimizer,) = trainer.replicas[0].updater._optimizers
        named = dict(trainer.replicas[0].named)
        twins = [each for group in optimizer.param_groups for each in group["params"]]
        assert [each.shape for each in twins] == [each.shape for each in named.values()]
        assert all(each.untyped_storage().nbytes() <= 8 and each.grad is None for each in twins)
        assert all(torch.equal(each, theirs[name]) for name, each in named.items())
        assert not {id(each) for each in twins} & {id(each) for each in named.values()}
        largest = max(each.nbytes for each in named.values())
        assert len(states[0]._rooms) == 2 and states[0]._rooms[0].nbytes <= 2 * (100 + largest + 6 * 64)


@pytest.mark.covering("dp=2,zero=1")
@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_checkpoints_have_the_same_bytes_and_each_resumes_the_other(
    plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, longer = (offload_job("mlp", "groups", steps=steps) for steps in (2, 4))
    ran(job, plan, out=tmp_path / "without")
    expected = ran(longer, plan, resume=tmp_path / "without")
    on_host(monkeypatch, LateLane)
    ran(job, f"{plan},offload=optimizer", out=tmp_path / "with")
    assert tensor_files(tmp_path / "without") == tensor_files(tmp_path / "with")
    for before, after in (("without", f"{plan},offload=optimizer"), ("with", plan)):
        ours = ran(longer, after, resume=tmp_path / before)
        assert all(torch.equal(ours[name], each) for name, each in expected.items())


def test_an_update_that_fails_leaves_no_window_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = torch.optim.SGD.step

    def failing(self: torch.optim.Optimizer, closure: Any = None) -> None:
        step(self)
        if any(each.shape == (9, 11) for group in self.param_groups for each in group["params"]):
            raise ArithmeticError("in the second window")

    monkeypatch.setattr(torch.optim.SGD, "step", failing)
    on_host(monkeypatch, LateLane)
    job = job_with("mlp", lambda named: torch.optim.SGD(named, lr=0.1))
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated") as trainer:
        with pytest.raises(ArithmeticError, match="in the second window"):
            trainer.fit()
        (optimizer,) = trainer.replicas[0].updater._optimizers
        twins = [each for group in optimizer.param_groups for each in group["params"]]
        assert len(twins) == 6 and all(each.untyped_storage().nbytes() <= 8 for each in twins)


def test_what_updates_on_gpus_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, DirectLane)
    job = job_with("mlp", lambda named: torch.optim.AdamW(named, capturable=True))
    with pytest.raises(PlanError, match=r"AdamW\(capturable=True\) updates on GPUs only"):
        Trainer(job, "dp=1,offload=optimizer", devices="simulated")


def test_the_hosts_own_memory_needs_no_lane() -> None:
    assert isinstance(lane_of(CPU), DirectLane)


def test_state_that_the_host_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the ranks' of one host counts together; under zero=1 they hold half as much."""
    monkeypatch.setattr(memory_check, "total_bytes", lambda: 3000)
    with Trainer(offload_job("mlp", "groups"), "dp=2", devices="simulated", overcommit=True) as trainer:
        for replica in trainer.replicas:
            replica.plan = Plan.parse("dp=2,offload=optimizer")
        with pytest.raises(
            PlanError,
            match=r"2 ranks of a host hold at least 3.\d\d KiB of optimizer state in its memory, which is 2.93 KiB",
        ):
            trainer.together(memory_check.check_host_fits)
        for replica in trainer.replicas:
            replica.plan = Plan.parse("dp=2,zero=1,offload=optimizer")
        trainer.together(memory_check.check_host_fits)

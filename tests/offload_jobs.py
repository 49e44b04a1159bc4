"""Runs of small jobs with and without offload=optimizer, in which every tensor of state goes to the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.checkpoint.checkpoint import find
from meshloom.core.job import Job, NamedParameters
from meshloom.optimizer.offload import disk
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from tests.jobs import make_job


def decay_groups(named: NamedParameters, **settings: Any) -> Optimizer:
    """AdamW with matrices in one group and the rest in another."""
    matrices = [each for _, each in named if each.ndim > 1]
    rest = [each for _, each in named if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.01, **settings)


BUILDS: dict[str, Any] = {
    "groups": decay_groups,
    "foreach": lambda named: decay_groups(named, foreach=True),
    "fused": lambda named: decay_groups(named, fused=True),
    "amsgrad": lambda named: torch.optim.Adam(named, lr=0.01, amsgrad=True),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.01, centered=True, momentum=0.9),
}


def job_with(model: str, build: Callable[[NamedParameters], Any], **settings: Any) -> Job:
    """`make_job` with another optimizer, without scheduler."""
    return replace(make_job(model, "adamw", scheduler=None, **settings), optimizer=build)


def offload_job(model: str, optimizer: str, **settings: Any) -> Job:
    """`make_job`, with the optimizers of `BUILDS` too."""
    if optimizer in BUILDS:
        return job_with(model, BUILDS[optimizer], **settings)
    return make_job(model, optimizer, **settings)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size are moved, and windows are of a few parameters."""
    monkeypatch.setattr(disk, "SMALLEST", 1)
    monkeypatch.setattr(disk, "WINDOW_BYTES", 500)


def ran(job: Job, plan: str, *, dtype: torch.dtype | None = None, **settings: Any) -> dict[str, Tensor]:
    """The model after the job's last step. With offload=optimizer, checks that state is in the file."""
    with Trainer(job, plan, devices="simulated", dtype=dtype, **settings) as trainer:
        trainer.fit()
        if trainer.plan.offload != "none":
            assert any(in_file(replica.updater) for replica in trainer.replicas)
        return trainer.together(full_state)[0]


def in_file(updater: Any) -> int:
    """How many tensors of state are in the file; all that have a dim, or the test fails."""
    offloaded = updater._offloaded
    count = 0
    for optimizer in updater._optimizers:
        parameters: list[nn.Parameter] = [
            each for group in optimizer.param_groups for each in group["params"]
        ]
        for each in disk._state_of(optimizer, parameters):
            held = offloaded._file.holds(each)
            assert held or not each.ndim or not each.numel(), f"state {list(each.shape)} is in memory"
            count += held
    return count


def tensor_files(out: Path) -> dict[str, bytes]:
    """The bytes of the newest checkpoint's files of tensors, by name."""
    return {each.name: each.read_bytes() for each in find(out).iterdir() if each.suffix == ".safetensors"}

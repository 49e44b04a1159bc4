"""Trains under a plan on the second device and on the CPU: the same values, and how often the host waited."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing import host_copy
from meshloom.comm.group import Group
from meshloom.core.device import lanes, readback
from meshloom.core.mesh import Mesh
from meshloom.launch import opening
from meshloom.launch.one_process import simulated_ranks
from meshloom.launch.world import CARRIES_TENSORS, Use, World
from meshloom.optimizer import offload
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.second_device.device import NAME, SecondDevice
from tests.second_device.lane import RecordedLane
from tests.second_device.plans import Rehearsed
from tests.second_device.streamed_group import StreamedGroup
from tests.second_device.waits import Waits


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of a rank, on average: how often its host waited, and how often while chunks were computed. where: the functions
    that wait, over all ranks. left: the least share of the step's operators that the device had still to do when a host
    waited; 1 if none waited. error: the largest relative difference from the CPU's values."""

    waits: float
    in_chunks: float
    where: str
    left: float
    error: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rehearse(device: SecondDevice, case: Rehearsed) -> Found:
    """A whole run of a few steps, of which one is counted."""
    expected, _ = _trained(case, None)
    ours, found = _trained(case, device)
    assert found
    error = max(_error(ours[name], each) for name, each in expected.items())
    return replace(found, error=error)


def _trained(case: Rehearsed, device: SecondDevice | None) -> tuple[dict[str, Tensor], Found | None]:
    waits = Waits()
    began = ended = 0
    with tempfile.TemporaryDirectory() as out, _on(device):
        saves: dict[str, Any] = {"out": Path(out)} if case.what == "checkpoint" else {}
        with Trainer(
            case.job(), case.plan, devices="simulated", dtype=case.dtype, listener=QUIET, **saves
        ) as trainer:
            size = trainer.plan.mesh.size
            for batch in trainer.batches():
                counts = device is not None and batch.step == 3
                if case.what == "step" and counts:
                    assert device
                    device.step_began = began = device.position
                    with device.listening(waits):
                        trainer.step(batch)
                    ended = device.position
                else:
                    trainer.step(batch)
                if case.what != "step" and batch.step >= 2:
                    began = device.position if device else 0
                    with device.listening(waits if counts else _nothing) if device else _never():
                        trainer.evaluate() if case.what == "evaluation" else trainer.save(wait=False)
                    ended = device.position if device else 0
            values = {
                name: each.cpu() for name, each in trainer.together(full_state)[0].items() if each is not None
            }
            if device:
                _check_devices(trainer)
        if saves:
            checkpoint = Checkpoint.open(max(Path(out).glob("step-*")))
            values |= {f"saved {name}": each.clone() for name, each in checkpoint.weights().items()}
    found = None
    if device:
        left = min((each / max(ended - began, 1) for each in waits.left), default=1.0)
        found = Found(
            waits=waits.found.total() / size,
            in_chunks=waits.in_chunks / size,
            where=str(waits),
            left=left,
            error=0.0,
        )
    return values, found


@contextmanager
def _on(device: SecondDevice | None) -> Iterator[None]:
    """Worlds of this process compute on the device."""
    if device is None:
        yield
        return

    def lane_of(where: torch.device) -> lanes.Lane:
        return RecordedLane(device) if where.type == NAME else lanes.lane_of(where)

    def opened(mesh: Mesh, devices: str, *, saving: bool = False, **_: bool) -> World:
        def wrap(groups: Sequence[Group], members: Sequence[int], use: Use) -> Sequence[Group]:
            return [StreamedGroup(each, device) for each in groups] if use in CARRIES_TENSORS else groups

        ranks = simulated_ranks(mesh, [device.device] * mesh.size, wrap, saving=saving)
        return World(mesh, ranks, "simulated", f"simulated: on {NAME}")

    with (
        patch.object(opening, "world_in_one_process", opened),
        patch.object(readback, "lane_of", lane_of),
        patch.object(host_copy, "lane_of", lane_of),
        patch.object(offload, "lane_of", lane_of),
    ):
        yield


def _check_devices(trainer: Trainer) -> None:
    """Everything that ranks hold lies on the device; only an optimizer's count of steps is the host's, as torch has it, and
    what is offloaded."""
    for replica in trainer.replicas:
        for name, tensor in (*replica.model.named_parameters(), *replica.model.named_buffers()):
            assert tensor.device.type in (NAME, "meta"), f"{name} is on {tensor.device}"
        for optimizer in replica.updater._optimizers:  # pyright: ignore[reportPrivateUsage]
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and replica.plan.offload == "none":
                        assert value.device.type == NAME, f"{key} is on {value.device}"


def _error(ours: Tensor, expected: Tensor) -> float:
    difference = (ours.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-3)) if ours.numel() else 0.0


def _nothing(wait: object) -> None:
    """Not counted."""


@contextmanager
def _never() -> Iterator[None]:
    yield

"""The systems that are timed: each makes the operation of a mode on buffers of its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.torch.c10d import C10dGroup

MODES = ("barrier", "all_reduce", "all_reduce_in_place", "reduce_scatter", "all_gather")
TIMEOUT = timedelta(seconds=120)
# a piece of each buffer stays in a core's cache between its reduction and the copies of it
FLOOR_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective, ready to be called again and again.

    call: starts it and waits for it. given, result: float32 [n] each, the same tensor where the operation
        works in place.
    """

    call: Callable[[], None]
    given: Tensor
    result: Tensor


class System(ABC):
    """One way for ranks to talk, opened on every rank."""

    @abstractmethod
    def operation(self, mode: str, num_bytes: int) -> Operation | None:
        """The operation of a mode whose whole tensor (all ranks' slices together) has `num_bytes`; None: it
        has none such."""


class Groups(System):
    """A group of meshloom.

    window: float32 memory that all ranks have mapped, for `all_reduce_in_place`; None: any memory is in place
        already.
    """

    def __init__(self, group: Group, window: Tensor | None = None) -> None:
        self._group, self._window = group, window

    def operation(self, mode: str, num_bytes: int) -> Operation | None:
        group = self._group
        if mode == "barrier":
            nothing = torch.empty(0)
            return Operation(call=lambda: group.barrier().wait(), given=nothing, result=nothing)
        whole, slice_ = _buffers(num_bytes, group.size)
        if mode == "all_reduce_in_place" and self._window is not None:
            whole = self._window[: whole.numel()]
        if mode == "reduce_scatter":
            return Operation(
                call=lambda: group.reduce_scatter(slice_, whole).wait(), given=whole, result=slice_
            )
        if mode == "all_gather":
            return Operation(call=lambda: group.all_gather(whole, slice_).wait(), given=slice_, result=whole)
        return Operation(call=lambda: group.all_reduce(whole).wait(), given=whole, result=whole)


class OpenMPI(System):
    """mpi4py with buffers, in the processes that mpirun started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD

    def operation(self, mode: str, num_bytes: int) -> Operation | None:
        world = self._world
        if mode == "barrier":
            nothing = torch.empty(0)
            return Operation(call=world.Barrier, given=nothing, result=nothing)
        whole, slice_ = _buffers(num_bytes, world.Get_size())
        whole_array, slice_array = whole.numpy(), slice_.numpy()
        if mode == "reduce_scatter":
            return Operation(
                call=lambda: world.Reduce_scatter_block(whole_array, slice_array), given=whole, result=slice_
            )
        if mode == "all_gather":
            return Operation(
                call=lambda: world.Allgather(slice_array, whole_array), given=slice_, result=whole
            )
        if mode == "all_reduce_in_place":
            return Operation(
                call=lambda: world.Allreduce(self._mpi.IN_PLACE, whole_array), given=whole, result=whole
            )
        other = torch.zeros_like(whole)
        other_array = other.numpy()
        return Operation(call=lambda: world.Allreduce(whole_array, other_array), given=whole, result=other)


class Floor(System):
    """What an all-reduce in place must read and write at least, by plain memory operations and without any
    word between the ranks.

    Each rank takes its share of the elements: it reads it in all ranks' buffers, adds up, and writes the sum
    to all of them.
    """

    def __init__(self, rank: int, size: int, directory: Path, largest: int) -> None:
        self._rank, self._size = rank, size
        path = Path("/dev/shm", f"{directory.name}-floor")
        count = size * largest // 4
        if rank == 0:
            with path.open("wb") as file:
                os.truncate(file.fileno(), 4 * count)
        dist.barrier()
        self._buffers = torch.from_file(str(path), shared=True, size=count, dtype=torch.float32).view(
            size, -1
        )
        self._buffers[rank].zero_()  # so that its pages are there
        dist.barrier()
        if rank == 0:
            path.unlink()

    def operation(self, mode: str, num_bytes: int) -> Operation | None:
        if mode != "all_reduce_in_place":
            return None
        buffers = [buffer[: num_bytes // 4] for buffer in self._buffers]
        pieces = list(
            zip(
                *(buffer.chunk(self._size)[self._rank].split(FLOOR_PIECE_BYTES // 4) for buffer in buffers),
                strict=True,
            )
        )

        def call() -> None:
            for first, second, *others in pieces:
                torch.add(first, second, out=first)
                for other in others:
                    first.add_(other)
                for other in (second, *others):
                    other.copy_(first)

        return Operation(call=call, given=buffers[self._rank], result=buffers[self._rank])


def open_systems(names: list[str], rank: int, size: int, directory: Path, largest: int) -> dict[str, System]:
    """By name, on every rank. `dist` is open already. largest: bytes of the largest tensor."""
    members = [f"rank {each}" for each in range(size)]
    made: dict[str, System] = {}
    for name in names:
        if name == "shm":
            made[name] = _open_shm(rank, size, members, largest)
        elif name == "gloo":
            assert dist.group.WORLD is not None
            made[name] = Groups(C10dGroup(dist.group.WORLD, members))
        elif name == "openmpi":
            made[name] = OpenMPI()
        else:
            made[name] = Floor(rank, size, directory, largest)
    return made


def _open_shm(rank: int, size: int, members: list[str], largest: int) -> System:
    from meshloom.comm.shm.shared_memory import ShmGroup

    world: Any = dist.group.WORLD
    group = ShmGroup(dist.PrefixStore("shm", world.get_group_store()), rank, size, members, timeout=TIMEOUT)
    return Groups(group, group.window(largest).of(rank).view(torch.float32))


def _buffers(num_bytes: int, size: int) -> tuple[Tensor, Tensor]:
    """The whole tensor and a rank's slice of it, written once so that their pages are there."""
    whole = torch.ones(num_bytes // 4)
    return whole, torch.ones(whole.numel() // size)

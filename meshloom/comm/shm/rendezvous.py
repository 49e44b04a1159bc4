"""The rendezvous of a group's ranks: each maps the memory of all others, found through a signed store."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from meshloom.comm.network.signed_store import SignedStore
from meshloom.comm.shm.segments import create_file, map_file, open_file
from meshloom.core.errors import CollectiveError, PeerLostError
from meshloom.core.units import format_bytes

_NO_SPACE = os.strerror(errno.ENOMEM)


@dataclass(frozen=True)
class OwnFile:
    """A file that grows; it is closed with the group."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Memory of a group, mapped by this rank.

    processes: process id of each rank.
    control: of the whole group, uint8. arenas: of each rank, uint8. own_file: of this rank's arena.
    """

    processes: Sequence[int]
    control: Tensor
    arenas: Sequence[Tensor]
    own_file: OwnFile


class Rendezvous:
    """Of one rank. store: used by this group alone. members: name of each rank in errors. timeout: how long
    to wait for other ranks. secret: signs what ranks write into the store."""

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[str], timeout: timedelta, secret: bytes
    ) -> None:
        self._rank, self._members, self._timeout = rank, members, timeout
        self._store = SignedStore(store, rank, members, secret, timeout)

    def share(self, control_bytes: int, arena_bytes: int) -> GroupMemory:
        """Map the control area and all arenas; all ranks call it together.

        Raises `CollectiveError` if memory cannot be shared, `PeerLostError` if a rank does not come.
        """
        processes = [int(each) for each in self._all("process", str(os.getpid()))]
        own: list[int] = []  # descriptors of this rank's arena and, on rank 0, of the control area
        own_file: OwnFile | None = None
        problem = ""
        memory: GroupMemory | None = None
        with ExitStack() as stack:
            try:
                own = [create_file(arena_bytes, backed=False)]
                own_file = OwnFile(own[0])
                if self._rank == 0:
                    own.append(create_file(control_bytes, backed=True))
                    stack.callback(os.close, own[1])
            except (OSError, CollectiveError) as error:
                own, problem = [], str(error)
            numbers = [text.split() for text in self._all("files", " ".join(map(str, own)))]

            def mapped(rank: int, which: int, num_bytes: int) -> Tensor:
                if rank == self._rank:
                    return map_file(own[which], num_bytes)
                descriptor = open_file(processes[rank], int(numbers[rank][which]), num_bytes)
                stack.callback(os.close, descriptor)
                return map_file(descriptor, num_bytes)

            try:
                if own_file and all(numbers):
                    memory = GroupMemory(
                        processes=processes,
                        control=mapped(0, 1, control_bytes),
                        arenas=[mapped(rank, 0, arena_bytes) for rank in range(len(self._members))],
                        own_file=own_file,
                    )
            except OSError as error:
                problem = _reason(error, arena_bytes, len(self._members))
            problems = self._all("problems", problem)
        if memory and not any(problems):
            return memory
        reasons = [f"{member}: {each}" for member, each in zip(self._members, problems, strict=True) if each]
        raise CollectiveError(
            f"The ranks cannot share memory ({'; '.join(reasons)}). Let them use Gloo (--transport gloo)."
        )

    def _all(self, key: str, value: str) -> list[str]:
        """What each rank has written under a key."""
        try:
            return self._store.all_gather(key, value)
        except RuntimeError as error:
            absent = [
                member
                for member, there in zip(self._members, self._store.have_written(key), strict=True)
                if not there
            ]
            raise PeerLostError(
                f"{self._members[self._rank]} waited {self._timeout.total_seconds():g} s for {', '.join(absent) or 'the other ranks'} to share memory."
            ) from error


def _reason(error: OSError, arena_bytes: int, num_ranks: int) -> str:
    """Why memory could not be mapped. Mapping takes address space; only what is used becomes memory."""
    if error.errno != errno.ENOMEM:
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    allowed = (
        ""
        if limit == resource.RLIM_INFINITY
        else f", and ulimit -v allows {format_bytes(limit)} in all: raise it (ulimit -v unlimited)"
    )
    return f"{_NO_SPACE}: each rank maps {format_bytes(arena_bytes)} of address space for every one of {num_ranks} ranks, of which little is used{allowed}"

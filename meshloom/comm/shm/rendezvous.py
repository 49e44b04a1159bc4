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
from meshloom.comm.shm.segments import Anonymous, Files, Named, map_file
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

    files: the way in which it is shared. processes: process id of each rank.
    control: of the whole group, uint8. arenas: of each rank, uint8. own_file: of this rank's arena.
    """

    files: Files
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

    def share(self, control_bytes: int, arena_bytes: int, files: Files | None) -> GroupMemory:
        """Map the control area and all arenas; all ranks call it together. files: None: try each way.

        Raises `CollectiveError` if memory cannot be shared, `PeerLostError` if a rank does not come.
        """
        processes = [int(each) for each in self._all("process", str(os.getpid()))]
        reasons: list[str] = []
        for attempt, each in enumerate([files] if files else [Anonymous(), Named()]):
            memory, problems = self._try(attempt, each, processes, control_bytes, arena_bytes)
            if memory and not any(problems):
                return memory
            reasons += [
                f"{member}: {problem}"
                for member, problem in zip(self._members, problems, strict=True)
                if problem not in ("", "-")
            ]
            if any(problem.startswith(_NO_SPACE) for problem in problems):
                break  # other files would take as much address space
        raise CollectiveError(
            f"The ranks cannot share memory ({'; '.join(dict.fromkeys(reasons))}). Let them use Gloo (--transport gloo)."
        )

    def _try(
        self, attempt: int, files: Files, processes: Sequence[int], control_bytes: int, arena_bytes: int
    ) -> tuple[GroupMemory | None, list[str]]:
        """The memory, and each rank's problem: "" if it has none, "-" if only others have."""
        own: list[int] = []  # descriptors of this rank's arena and, on rank 0, of the control area
        own_file: OwnFile | None = None
        said, problem = "", ""
        memory: GroupMemory | None = None
        with ExitStack() as stack:
            try:
                arena, number = files.create(arena_bytes, backed=False)
                stack.callback(files.all_have_opened, number)
                own_file, own, said = OwnFile(arena), [arena], str(number)
                if self._rank == 0:
                    control, number = files.create(control_bytes, backed=True)
                    stack.callback(files.all_have_opened, number)
                    stack.callback(os.close, control)
                    own, said = [arena, control], f"{said} {number}"
            except (OSError, CollectiveError) as error:
                said, problem = "", str(error)
            numbers = [text.split() for text in self._all(f"{attempt}/files", said)]

            def mapped(rank: int, which: int, num_bytes: int) -> Tensor:
                if rank == self._rank:
                    return map_file(own[which], num_bytes)
                descriptor = files.open(processes[rank], int(numbers[rank][which]), num_bytes)
                stack.callback(os.close, descriptor)
                return map_file(descriptor, num_bytes)

            try:
                if own_file and all(numbers):
                    memory = GroupMemory(
                        files=files,
                        processes=processes,
                        control=mapped(0, 1, control_bytes),
                        arenas=[mapped(rank, 0, arena_bytes) for rank in range(len(self._members))],
                        own_file=own_file,
                    )
            except OSError as error:
                problem = _reason(error, arena_bytes, len(self._members))
            problems = self._all(f"{attempt}/problems", problem or ("" if memory else "-"))
        return memory, problems

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

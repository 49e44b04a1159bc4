"""The ranks of a group find each other's memory, through a store in which what they say is signed."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
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


class Meeting:
    """How the ranks of a group find each other's memory, through a store. secret: what they sign with."""

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[str], timeout: float, secret: bytes
    ) -> None:
        self._rank, self._size, self._members = rank, len(members), members
        self._timeout = timedelta(seconds=timeout)
        self._store = SignedStore(store, rank, members, secret, self._timeout)

    def share(
        self, control_bytes: int, arena_bytes: int, files: Files | None
    ) -> tuple[Files, list[int], Tensor, list[Tensor], OwnFile]:
        """How files are shared, the ranks' processes, the control area, all arenas, the own one's file.
        Raises `CollectiveError`, `PeerLostError`."""
        processes = [int(each) for each in self._all("process", str(os.getpid()))]
        tried: list[str] = []
        for number, way in enumerate([files] if files else [Anonymous(), Named()]):
            made: list[tuple[int, int]] = []
            problem = ""
            try:
                made = [way.create(arena_bytes, backed=False)] + (
                    [way.create(control_bytes, backed=True)] if self._rank == 0 else []
                )
            except (OSError, CollectiveError) as error:
                problem = str(error)
            told = self._all(f"{number}/files", " ".join(str(each) for _, each in made))
            opened: list[int] = []
            try:
                if not problem and all(told):
                    _, *others = told[0].split()
                    arenas: list[int] = []
                    for rank, files_of_rank in enumerate(told):
                        if rank == self._rank:
                            arenas.append(made[0][0])
                        else:
                            opened.append(
                                way.open(processes[rank], int(files_of_rank.split()[0]), arena_bytes)
                            )
                            arenas.append(opened[-1])
                    control = (
                        made[1][0]
                        if self._rank == 0
                        else way.open(processes[0], int(others[0]), control_bytes)
                    )
                    opened.append(control)
                    mapped = (
                        map_file(control, control_bytes),
                        [map_file(each, arena_bytes) for each in arenas],
                    )
                else:
                    mapped = None
            except OSError as error:
                problem, mapped = _why(error, arena_bytes, len(self._members)), None
            try:
                problems = self._all(f"{number}/problems", problem or ("" if mapped else "-"))
            finally:
                for _, each in made:
                    way.all_have_opened(each)
            for each in opened:
                os.close(each)
            if mapped and not any(problems):
                return way, processes, *mapped, OwnFile(made[0][0])
            for descriptor, _ in made:
                if descriptor not in opened:
                    os.close(descriptor)
            tried += [
                f"{self._members[rank]}: {each}"
                for rank, each in enumerate(problems)
                if each not in ("", "-")
            ]
            if any(each.startswith(_NO_SPACE) for each in problems):
                break  # other files would take as much of it
        raise CollectiveError(
            f"The ranks cannot share memory ({'; '.join(dict.fromkeys(tried))}). Let them talk over Gloo (--transport gloo)."
        )

    def _all(self, key: str, value: str) -> list[str]:
        """What each rank says under a key."""
        try:
            return self._store.all_say(key, value)
        except RuntimeError as error:
            absent = [
                member
                for member, there in zip(self._members, self._store.have_said(key), strict=True)
                if not there
            ]
            raise PeerLostError(
                f"{self._members[self._rank]} waited {self._timeout.total_seconds():g} s for {', '.join(absent) or 'the other ranks'} to share memory."
            ) from error


def _why(error: OSError, arena_bytes: int, num_ranks: int) -> str:
    """Why memory could not be mapped. What is mapped is address space: only what is used of it becomes
    memory."""
    if error.errno != errno.ENOMEM:
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    allowed = (
        ""
        if limit == resource.RLIM_INFINITY
        else f", and ulimit -v allows {format_bytes(limit)} in all: raise it (ulimit -v unlimited)"
    )
    return f"{_NO_SPACE}: each rank maps {format_bytes(arena_bytes)} of address space for every one of {num_ranks} ranks, of which little is used{allowed}"

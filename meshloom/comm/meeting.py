"""The ranks of a group find each other's memory, through a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from meshloom.comm.segments import Anonymous, Files, Named, map_file
from meshloom.errors import CollectiveError, PeerLostError


@dataclass(frozen=True)
class OwnFile:
    """A file that grows; it is closed with the group."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class Meeting:
    """How the ranks of a group find each other's memory, through a store."""

    def __init__(self, store: dist.Store, rank: int, size: int, members: Sequence[str], timeout: float) -> None:
        self._store, self._rank, self._size, self._members = store, rank, size, members
        self._timeout = timedelta(seconds=timeout)

    def share(self, control_bytes: int, arena_bytes: int, files: Files | None) -> tuple[Files, list[int], Tensor, list[Tensor], OwnFile]:
        """How files are shared, the ranks' processes, the control area, all arenas, the own one's file. Raises `CollectiveError`, `PeerLostError`."""
        processes = [int(each) for each in self._all("process", str(os.getpid()))]
        tried: list[str] = []
        for number, way in enumerate([files] if files else [Anonymous(), Named()]):
            made: list[tuple[int, int]] = []
            problem = ""
            try:
                made = [way.create(arena_bytes, backed=False)] + ([way.create(control_bytes, backed=True)] if self._rank == 0 else [])
            except (OSError, CollectiveError) as error:
                problem = str(error)
            told = self._all(f"{number}/files", " ".join(str(each) for _, each in made))
            opened: list[int] = []
            try:
                if not problem and all(told):
                    _, *others = told[0].split()
                    arenas = [
                        made[0][0] if rank == self._rank else way.open(processes[rank], int(told[rank].split()[0])) for rank in range(self._size)
                    ]
                    opened += [each for rank, each in enumerate(arenas) if rank != self._rank]
                    control = made[1][0] if self._rank == 0 else way.open(processes[0], int(others[0]))
                    opened.append(control)
                    mapped = map_file(control, control_bytes), [map_file(each, arena_bytes) for each in arenas]
                else:
                    mapped = None
            except OSError as error:
                problem, mapped = str(error), None
            problems = self._all(f"{number}/problems", problem or ("" if mapped else "-"))
            for _, each in made:
                way.all_have_opened(each)
            for each in opened:
                os.close(each)
            if mapped and not any(problems):
                return way, processes, *mapped, OwnFile(made[0][0])
            for descriptor, _ in made:
                if descriptor not in opened:
                    os.close(descriptor)
            tried += [f"{self._members[rank]}: {each}" for rank, each in enumerate(problems) if each not in ("", "-")]
        raise CollectiveError(f"The ranks cannot share memory ({'; '.join(tried)}). Let them talk over Gloo (--transport gloo).")

    def _all(self, key: str, value: str) -> list[str]:
        """What each rank says under a key."""
        try:
            self._store.set(f"{key}/{self._rank}", f"={value}")
            self._store.wait([f"{key}/{rank}" for rank in range(self._size)], self._timeout)
            return [self._store.get(f"{key}/{rank}").decode()[1:] for rank in range(self._size)]
        except RuntimeError as error:
            absent = [self._members[rank] for rank in range(self._size) if not _said(self._store, f"{key}/{rank}")]
            raise PeerLostError(
                f"{self._members[self._rank]} waited {self._timeout.total_seconds():g} s for {', '.join(absent) or 'the other ranks'} to share memory."
            ) from error


def _said(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:
        return False

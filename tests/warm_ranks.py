"""Rank processes that stay: they run one function after another, so that a property test can try many
examples in one world.

Ranks are forked from the server of `processes.py` and meet in a store of this process.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from processes import CONTEXT, RankError
from torch.distributed import PrefixStore, Store, TCPStore

from meshloom.comm.shm.native_engine import SharedMemorySettings
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.shm.window import SharedWindow

MEETING_SECONDS = 30.0
WINDOW_BYTES = 1 << 20
TINY = SharedMemorySettings(
    small_bytes=64, chunk_bytes=512, piece_bytes=4096, eager_bytes=16384, message_piece_bytes=4096, message_bytes=16384, spins=0, yields=0
)  # fmt: skip


class WarmRanks:
    """`size` rank processes. A context: they end with it.

    pids: by rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> WarmRanks:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self.size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(there, rank, self.size, port), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self.pids = [process.pid for process in self._processes]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for end in self._ends:
            end.close()
        del self._store

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin `function(warm, *arguments)` on every rank; `function` is importable."""
        for end in self._ends:
            end.send_bytes(pickle.dumps((function, arguments)))

    def results(self, timeout_seconds: float, without: Sequence[int] = ()) -> list[Any]:
        """What it returned on each rank; None for those in `without`, which nobody waits for.

        Raises `RankError` with what all ranks say that failed; then the ranks are new ones.
        """
        deadline = time.monotonic() + timeout_seconds
        results: dict[int, Any] = dict.fromkeys(without)
        problems: list[str] = []
        while missing := [rank for rank in range(self.size) if rank not in results]:
            ready = wait([self._ends[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                problems.append(f"Ranks {missing} have not returned in time.")
                break
            for rank in missing:
                if self._ends[rank] in ready:
                    failed, results[rank] = self._answer(rank)
                    if failed:
                        problems.append(f"Rank {rank}: {results[rank]}")
                        deadline = min(deadline, time.monotonic() + 1.0)
        if problems:
            self.__exit__()
            self.__enter__()
            raise RankError("\n".join(problems))
        return [results[rank] for rank in range(self.size)]

    def wait_for(self, keys: list[str]) -> None:
        """Until the ranks have set these in their store."""
        self._store.wait(keys, timedelta(seconds=MEETING_SECONDS))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._ends[rank].recv_bytes())
        except EOFError:
            return True, "died."

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """Both."""
        self.start(function, *arguments)
        return self.results(timeout_seconds)


class WarmRank:
    """What a rank has for as long as its process lives.

    rank, size: in the world. store: for meetings.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size, self.store = rank, size, store
        self._opened: Counter[tuple[int, ...]] = Counter()
        self._kept: dict[tuple[tuple[int, ...], bool], tuple[ShmGroup, SharedWindow]] = {}

    def open(
        self,
        members: Sequence[int] | None = None,
        timeout_seconds: float = 20.0,
        settings: SharedMemorySettings | None = None,
    ) -> ShmGroup:
        """A new group of these ranks (None: all of the world), called by its members."""
        key = tuple(range(self.size)) if members is None else tuple(members)
        self._opened[key] += 1
        store = PrefixStore(f"{key}, {self._opened[key]}", self.store)
        names = [f"rank {rank} (dp={rank})" for rank in key]
        timeout = timedelta(seconds=timeout_seconds)
        return ShmGroup(store, key.index(self.rank), len(key), names, timeout=timeout, settings=settings)

    def kept(self, members: Sequence[int], tiny: bool) -> tuple[ShmGroup, SharedWindow]:
        """The group of these ranks that is kept, and its window of `WINDOW_BYTES`. tiny: of the group whose
        settings make many pieces of little."""
        key = tuple(members), tiny
        if key not in self._kept:
            group = self.open(members, settings=TINY if tiny else None)
            self._kept[key] = group, group.window(WINDOW_BYTES)
        return self._kept[key]


def _serve(end: Connection, rank: int, size: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    store = TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEETING_SECONDS)
    )
    warm = WarmRank(rank, size, store)
    while True:
        try:
            function, arguments = pickle.loads(end.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = (False, function(warm, *arguments))
        except BaseException:
            answer = (True, traceback.format_exc())
        end.send_bytes(pickle.dumps(answer))

"""Simulated ranks take turns: each runs alone until it waits for the others.

Two ways, both deterministic and free of deadlock:

    run_in_steps    a rank is a generator; `yield` means "no rank continues before all have come here". One thread.

                    rank 0   compute, start -> yield         wait, update -> return
                    rank 1                  compute, start -> yield       wait, update -> return

    Turns.run       a rank is a function that waits within its work (for batch statistics inside a forward). Each
                    has a thread, exactly one of them runs at a time, and a wait passes the turn on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from meshloom.core.errors import CollectiveError
from meshloom.core.random import preserved_draws_of_devices

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_in_steps(
    ranks: Sequence[Steps[T]], advance: Callable[[Sequence[Steps[T]]], list[tuple[bool, Any]]] | None = None
) -> list[T]:
    """Advance every generator to its next yield, in rank order, until all have returned; their results.

    advance: runs one round in another way. Raises `CollectiveError` if one returns while others still wait.

    >>> def rank(number):
    ...     yield
    ...     return number * 10
    >>> run_in_steps([rank(0), rank(1)])
    [0, 10]
    """
    try:
        while True:
            round_ = advance(ranks) if advance else [advance_one(rank) for rank in ranks]
            finished = [done for done, _ in round_]
            if all(finished):
                return [result for _, result in round_]
            if any(finished):
                raise CollectiveError(
                    f"Rank {finished.index(True)} finished while rank {finished.index(False)} still waits for it."
                )
    finally:
        for rank in ranks:
            rank.close()


def advance_one(rank: Steps[Any]) -> tuple[bool, Any]:
    """Run to the next yield: (False, None), or (True, result) if it returned."""
    try:
        next(rank)
    except StopIteration as stop:
        return True, stop.value
    return False, None


class _AutocastRegions:
    """Keeps what autocast has cast while a rank waits in a region of its own.

    torch keeps the casts of all threads in one place, and forgets all of them where a thread leaves its outermost region.
    While others wait in theirs, a rank that runs is held one region deeper than it knows, so that it forgets nothing.
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # rank -> regions that it is in, of those that wait
        self._held: set[int] = set()

    def pause(self, rank: int) -> None:
        """The rank passes the turn."""
        self._depths[rank] = _autocast_depth() - (rank in self._held)

    def resume(self, rank: int) -> None:
        """The rank has got the turn."""
        self._depths.pop(rank, None)
        hold = any(self._depths.values())
        if hold and rank not in self._held:
            torch.autocast_increment_nesting()
            self._held.add(rank)
        elif not hold and rank in self._held:
            self._held.discard(rank)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def end(self, rank: int) -> None:
        """The rank has returned, or failed."""
        self._depths.pop(rank, None)
        if rank in self._held:
            self._held.discard(rank)
            torch.autocast_decrement_nesting()


def _autocast_depth() -> int:
    """Autocast regions that the calling thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Turns:
    """Functions that run one at a time and pass the turn when they wait."""

    def __init__(self) -> None:
        self._baton = threading.Condition()
        self._running: list[int] = []  # ranks that have not returned, the one whose turn it is first
        self._names: dict[int, int] = {}  # thread -> rank
        self._failed: BaseException | None = None
        self._regions = _AutocastRegions()
        self._idle_turns = 0  # consecutive turns in which no rank could continue

    @property
    def active(self) -> bool:
        """Whether the calling thread is one of the functions."""
        return threading.get_ident() in self._names

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run all to their end; their results. The first exception ends all of them and is raised."""
        results: list[Any] = [None] * len(functions)
        self._regions = _AutocastRegions()
        self._running, self._names, self._failed = list(range(len(functions))), {}, None

        def body(rank: int) -> None:
            self._names[threading.get_ident()] = rank
            try:
                self._await_turn(rank)
                self._regions.resume(rank)
                # Backward stays in this thread, on GPUs too: their own thread would serve all ranks, and wait with one.
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = functions[rank]()
            except BaseException as error:
                with self._baton:
                    self._failed = self._failed or error
                    self._baton.notify_all()
            finally:
                with self._baton:
                    self._idle_turns = 0
                    self._regions.end(rank)
                    self._running.remove(rank)
                    self._baton.notify_all()
                del self._names[threading.get_ident()]

        if torch.version.cuda is not None and not torch.cuda.is_available():
            # a torch built for CUDA, 2.11 at least, has one thread's guard for all where no GPU is: that of the first with fake tensors,
            # without which the next would crash
            torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportPrivateUsage]
        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(len(functions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed
        return results

    def run_steps(self, ranks: Sequence[Steps[T]]) -> list[T]:
        """`run` for generators, each of which passes the turn where it waits inside, not where it yields."""
        return self.run([lambda rank=rank: run_in_steps([rank])[0] for rank in ranks])

    def wait_for(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let the others run until `ready()`. Raises `CollectiveError(what())` if all wait in vain."""
        rank = self._names[threading.get_ident()]
        self._idle_turns = 0  # this rank has made progress, which another may wait for
        with preserved_draws_of_devices():
            while not ready():
                if self._idle_turns > len(self._running):
                    raise CollectiveError(what())
                self._idle_turns += 1
                self._regions.pause(rank)
                with self._baton:
                    self._running.append(self._running.pop(0))
                    self._baton.notify_all()
                self._await_turn(rank)
                self._regions.resume(rank)

    def _await_turn(self, rank: int) -> None:
        with self._baton:
            self._baton.wait_for(lambda: self._failed or self._running[0] == rank)
            if self._failed:
                raise CollectiveError(f"Rank {rank} ends because another rank failed.") from self._failed

"""Simulated ranks take turns: each runs alone until it waits for the others.

A rank is a thread that lives as long as its `Turns`, with a lock of its own. Exactly one of them runs. A wait passes the turn to the next
rank that can go on, in the order of ranks, so that every run has the same order of all that happens:

    rank 0   compute, start, wait            update, return
    rank 1                       compute, start, wait      update, return
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from meshloom.core.errors import CollectiveError
from meshloom.core.random import draws_apart

T = TypeVar("T")
Ready = Callable[[], bool]

_HERE = threading.local()  # .rank: the rank whose thread this is
_LOOK_SECONDS = 0.5  # between two looks for a signal
_WAITING_IN = str(Path(__file__).parent)  # files whose lines say nothing about where a rank waits


def in_turns(
    functions: Sequence[Callable[[], T]], apart: Callable[[], AbstractContextManager[None]] = draws_apart
) -> list[T]:
    """Runs every function as a simulated rank, to its end; their results. apart: as of `Turns`.

    >>> in_turns([lambda: 1, lambda: 2])
    [1, 2]
    """
    with closing(Turns(apart)) as turns:
        return turns.run(functions)


def wait_until(ready: Ready, what: Callable[[], str]) -> None:
    """Lets other ranks run until `ready()`, which is cheap and may be called from any rank's thread. what: says what this rank waits
    for, if none can go on; who is no simulated rank does not wait at all. Raises `CollectiveError`."""
    rank: _Rank | None = getattr(_HERE, "rank", None)
    if rank is not None and rank.turns is not None:
        rank.turns.wait(rank, ready, what)
    elif not ready():
        raise CollectiveError(what())


class Turns:
    """The threads of a process's simulated ranks. apart: a context of a rank that waits, in which others run; they all draw from the
    process's generators. kernels: threads on which torch computes for each of them; None: as elsewhere."""

    def __init__(
        self, apart: Callable[[], AbstractContextManager[None]] = draws_apart, kernels: int | None = None
    ) -> None:
        self._apart, self._kernels = apart, kernels
        self._ranks: list[_Rank] = []
        self._running: list[_Rank] = []  # those of this run that have not returned, in order
        self._now: _Rank | None = None  # whose turn it is
        self._failed: BaseException | None = None
        self._over = threading.Lock()  # held while any of them runs
        self._over.acquire()
        self._regions = _AutocastRegions()
        self.close = weakref.finalize(self, _end, self._ranks)  # called when nobody has this any more, too

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Runs all to their end; their results. The first exception ends the others, one after the other, each where it waits, and is
        raised."""
        started = self._start(len(functions))
        ranks = self._ranks[: len(functions)]
        self._failed, self._running = None, [*ranks]
        for rank, function in zip(ranks, functions, strict=True):
            rank.turns, rank.function, rank.ready = self, function, _begins
        with _interrupts(self._interrupt):
            self._pass_to(ranks[0])
            over = False
            while not over:  # Python misses a signal that comes just before it blocks
                try:
                    over = self._over.acquire(timeout=_LOOK_SECONDS)
                except BaseException as error:  # of another signal
                    self._interrupt(error)
        if started and self._kernels is not None:
            # threads that are made later take the newest number of any
            torch.set_num_threads(torch.get_num_threads())
        results = [rank.take() for rank in ranks]
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        return results

    def _interrupt(self, error: BaseException) -> None:
        """Ends all at their next wait; called once more, the one that runs, where it is."""
        if self._failed is not None and self._now is not None:
            _raise_in(self._now.thread, type(error))
        self._failed = self._failed or error

    def wait(self, rank: _Rank, ready: Ready, what: Callable[[], str]) -> None:
        """Of a rank of this run, whose turn it is."""
        self._check(rank)
        if ready():
            return
        rank.ready, rank.what = ready, what
        self._regions.pause(rank.number)
        with self._apart():
            following = self._next(rank)
            if following is not rank:
                self._pass_to(following)
                rank.lock.acquire()
        self._regions.resume(rank.number)
        self._check(rank)

    def _check(self, rank: _Rank) -> None:
        if self._failed is not None:
            raise CollectiveError(f"Rank {rank.number} ends because another rank failed.") from self._failed

    def took_turn(self, rank: _Rank) -> None:
        """Begins a rank's part in the run, in its thread, and ends it."""
        try:
            if self._failed is None:
                self._regions.resume(rank.number)
                assert rank.function is not None
                rank.result = rank.function()
        except BaseException as error:
            self._failed = self._failed or error
        self._regions.end(rank.number)
        self._running.remove(rank)
        if self._running:
            self._pass_to(self._next(rank))
        else:
            self._over.release()

    def _next(self, rank: _Rank) -> _Rank:
        """Who goes on now that `rank` waits or has returned: the first after it that can; all of them can once one has failed."""
        after = [each for each in self._running if each.number > rank.number]
        others = [*after, *(each for each in self._running if each.number <= rank.number)]
        try:
            for each in others:
                if self._failed is not None or each.ready():
                    return each
            self._failed = CollectiveError(self._why_none_goes_on())
        except BaseException as error:  # of what another rank waits for
            self._failed = error
        return others[0]

    def _why_none_goes_on(self) -> str:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        waits = [
            f"{rank.what()} It is at {_place(frames[rank.thread.ident])}."
            for rank in self._running
            if rank.thread.ident is not None
        ]
        here = [rank for rank in self._ranks if rank.turns is not None and rank not in self._running]
        returned = [f"Rank {rank.number} has returned." for rank in here]
        return "\n".join([*waits, *returned])

    def _pass_to(self, rank: _Rank) -> None:
        self._now = rank
        rank.lock.release()

    def _start(self, size: int) -> bool:
        """Makes the threads that are missing; whether any were."""
        if size <= len(self._ranks):
            return False
        if torch.version.cuda is not None and not torch.cuda.is_available():
            # a torch built for CUDA, 2.11 at least, has one thread's guard for all where no GPU is: that of the first with fake tensors,
            # without which the next would crash
            torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportPrivateUsage]
        for number in range(len(self._ranks), size):
            self._ranks.append(_Rank(number, self._kernels))
        return True


@contextmanager
def _interrupts(take: Callable[[BaseException], None]) -> Iterator[None]:
    """A context in which Ctrl-C, which arrives in the main thread between any two lines, passes what it raises to `take` instead."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)
        except BaseException as error:
            take(error)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raises an error in the Python code of another thread, as soon as it runs some."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def _begins() -> bool:
    """What a rank waits for that has not begun."""
    return True


def _end(ranks: list[_Rank]) -> None:
    """Ends their threads."""
    for rank in ranks:
        rank.lock.release()
        if rank.thread is not threading.current_thread():  # which may have been the last that had the `Turns`
            rank.thread.join()
    ranks.clear()


class _Rank:
    """A thread that runs one function after the other, whenever its turn comes. turns: of the run that it takes part in."""

    def __init__(self, number: int, kernels: int | None) -> None:
        self.number, self._kernels = number, kernels
        self._default = torch.get_default_device()  # each thread has its own
        self.turns: Turns | None = None
        self.function: Callable[[], Any] | None = None
        self.result: Any = None
        self.ready: Ready = _begins  # what it waits for, and what it says of that
        self.what: Callable[[], str] = str
        self.lock = threading.Lock()  # free when it is this rank's turn
        self.lock.acquire()
        here = threading.current_thread()
        within = "" if here is threading.main_thread() else f"{here.name}, "
        self.thread = threading.Thread(target=self._live, name=f"{within}rank {number}", daemon=True)
        self.thread.start()

    def take(self) -> Any:
        """Its result, which is not kept."""
        result = self.result
        self.result = self.function = self.turns = None
        return result

    def _live(self) -> None:
        _HERE.rank = self
        # Backward stays in this thread, on GPUs too: their own thread would serve all ranks, and wait with one.
        torch.autograd.set_multithreading_enabled(False)
        if self._kernels is not None:
            torch.set_num_threads(self._kernels)
        if self._default.type != "cpu":
            torch.set_default_device(self._default)
        while True:
            self.lock.acquire()
            if self.turns is None:
                return
            self.turns.took_turn(self)


def _place(frame: FrameType | None) -> str:
    """The innermost line outside of this package of groups."""
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_WAITING_IN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


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

"""Operations in three phases that go on by themselves: none of them needs the caller to wait for it.

    caller           start 1   start 2   ... computes, or waits for another group ...   wait 1   wait 2
    first thread       [1 first, begins second]  [2 first, begins second]
    second thread                                [1 second is over, third]  [2 second is over, third]

A rank that waits for one group may hold up a rank that waits for another. If phases went on only in `wait`, two such ranks could wait for each
other for ever. Each thread takes the operations in the order of their start, which is the same on all ranks, so the groups that the phases
use see one order too, as long as no group is used by both threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from meshloom.comm.group import Work


@dataclass(frozen=True, kw_only=True)
class Phases:
    """first and third wait for what they start themselves; second only starts."""

    first: Callable[[], None]
    second: Callable[[], Sequence[Work]]
    third: Callable[[], None]


class PhasedLine:
    """A first-in-first-out line of such operations, with a thread for each end; whoever makes it closes it."""

    def __init__(self, name: str) -> None:
        self._front = ThreadPoolExecutor(1, thread_name_prefix=f"{name}, first phases")
        self._back = ThreadPoolExecutor(1, thread_name_prefix=f"{name}, last phases")
        self._failure: BaseException | None = None

    def start(self, phases: Phases) -> Future[None]:
        """What is done when the third phase is over. After one operation has failed, all later ones fail with its error."""
        begun = self._front.submit(self._begin, phases)
        return self._back.submit(self._end, phases, begun)

    def close(self) -> None:
        """End the threads, once what was started is over."""
        self._front.shutdown()
        self._back.shutdown()

    def _begin(self, phases: Phases) -> Sequence[Work]:
        with self._failing_for_good():
            phases.first()
            return phases.second()

    def _end(self, phases: Phases, begun: Future[Sequence[Work]]) -> None:
        works = begun.result()
        with self._failing_for_good():
            for work in works:
                work.wait()
            phases.third()

    @contextmanager
    def _failing_for_good(self) -> Generator[None]:
        """The groups below are out of step after a failure: some ranks have started phases that others never will."""
        if self._failure is not None:
            raise self._failure
        try:
            with torch.no_grad():  # which holds for a thread, not for a process
                yield
        except BaseException as error:
            self._failure = error
            raise

"""Operations in three phases that go on by themselves: none of them needs the caller to wait for it.

    caller           start 1   start 2   ... computes, or waits for another group ...   wait 1   wait 2
    first thread       [1 first, begins second]  [2 first, begins second]
    second thread                                [1 second is over, third]  [2 second is over, third]

A rank that waits for one group may hold up a rank that waits for another. If phases went on only in `wait`,
two such ranks could wait for each other for ever. Each thread takes the operations in the order of their
start, which is the same on all ranks, so the groups that the phases use see one order too, as long as no
group is used by both threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from meshloom.comm.background import FifoThread
from meshloom.comm.group import Work


@dataclass(frozen=True, kw_only=True)
class Phases:
    """first and third wait for what they start themselves; second only starts."""

    first: Callable[[], None]
    second: Callable[[], Sequence[Work]]
    third: Callable[[], None]


class PhasedLine:
    """A first-in-first-out line of such operations, with a thread for each end; whoever makes it closes it.

    The threads do not keep a process from ending: an operation that other ranks never join would do so for
    ever.
    """

    def __init__(self, name: str) -> None:
        self._front, self._back = FifoThread(f"{name}, first phases"), FifoThread(f"{name}, last phases")
        self._front_failure: BaseException | None = None
        self._back_failure: BaseException | None = None

    def start(self, phases: Phases) -> Future[None]:
        """What is done when the third phase is over. After one operation has failed, all later ones fail with
        its error."""
        begun = self._front.submit(lambda: self._begin(phases))
        return self._back.submit(lambda: self._end(phases, begun))

    def close(self, seconds: float) -> bool:
        """End the threads once what was started is over; whether that was so within `seconds` for each."""
        self._front.end()
        self._back.end()
        return self._front.ended_within(seconds) and self._back.ended_within(seconds)

    def _begin(self, phases: Phases) -> Sequence[Work]:
        # The groups below are out of step after a failure: some ranks have started phases that others never
        # will.
        if failure := self._front_failure or self._back_failure:
            raise failure
        try:
            with torch.no_grad():  # which holds for a thread, not for a process
                phases.first()
                return phases.second()
        except BaseException as error:
            self._front_failure = error
            raise

    def _end(self, phases: Phases, begun: Future[Sequence[Work]]) -> None:
        works = begun.result()
        if self._back_failure:  # one in front belongs to a later operation
            raise self._back_failure
        try:
            with torch.no_grad():
                for work in works:
                    work.wait()
                phases.third()
        except BaseException as error:
            self._back_failure = error
            raise

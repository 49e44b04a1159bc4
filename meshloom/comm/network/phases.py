"""Operations in three phases that run in the background, in two threads.

    caller           start 1   start 2   ... computes, or waits for another group ...   wait 1   wait 2
    first thread       [1 first, starts second]  [2 first, starts second]
    second thread                                [1 second finishes, third]  [2 second finishes, third]

A rank that waits for one group may block a rank that waits for another. If phases ran only in `wait`, two
such ranks could deadlock. Each thread runs operations in the order of their start, the same on all ranks. So
the groups that the phases use see one order on all ranks too, as long as no group is used by both threads.
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
    """The phases of one operation. first and third wait for what they start; second only starts works."""

    first: Callable[[], None]
    second: Callable[[], Sequence[Work]]
    third: Callable[[], None]


class PhasedLine:
    """A first-in-first-out queue of such operations with its two threads. Whoever constructs it closes it."""

    def __init__(self, name: str) -> None:
        self._front, self._back = FifoThread(f"{name}, first phases"), FifoThread(f"{name}, last phases")
        self._front_failure: BaseException | None = None
        self._back_failure: BaseException | None = None

    def start(self, phases: Phases) -> Future[None]:
        """Start an operation; the future is its third phase's. Once one has failed, later ones fail too."""
        started = self._front.submit(lambda: self._start_second(phases))
        return self._back.submit(lambda: self._finish(phases, started))

    def close(self, seconds: float) -> bool:
        """End the threads once the started operations are over; whether that took at most `seconds` each."""
        self._front.end()
        self._back.end()
        return self._front.ended_within(seconds) and self._back.ended_within(seconds)

    def _start_second(self, phases: Phases) -> Sequence[Work]:
        # After a failure the groups underneath are out of step: some ranks have started phases that others
        # never will.
        if failure := self._front_failure or self._back_failure:
            raise failure
        try:
            with torch.no_grad():  # the mode is per thread
                phases.first()
                return phases.second()
        except BaseException as error:
            self._front_failure = error
            raise

    def _finish(self, phases: Phases, started: Future[Sequence[Work]]) -> None:
        works = started.result()
        if self._back_failure:  # a failure of the front belongs to a later operation
            raise self._back_failure
        try:
            with torch.no_grad():
                for work in works:
                    work.wait()
                phases.third()
        except BaseException as error:
            self._back_failure = error
            raise

"""Groups whose ranks are threads of this process, and ranks that run as threads: for what waits in the
background, where no turns can be taken.

An operation is done when the last rank has started it, whatever the others do meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshloom.comm.group import Work
from meshloom.comm.simulated import simulated_groups

T = TypeVar("T")
WAIT_SECONDS = 20.0  # a test that takes longer hangs


def threaded_groups(size: int) -> list[Any]:
    """One connected group, as seen by each of its ranks. Each does what a simulated group does, one call at a
    time."""
    changed = threading.Condition()
    groups = simulated_groups(size)
    for group in groups:
        group._later.append(Any)  # type: ignore[arg-type]  # messages are those of collectives that are made of some
    return [ThreadedGroup(group, changed) for group in groups]


class ThreadedGroup:
    def __init__(self, group: Any, changed: threading.Condition) -> None:
        self._group, self._changed = group, changed
        self.rank, self.size = group.rank, group.size

    def __getattr__(self, name: str) -> Callable[..., Work | None]:
        def call(*arguments: Any) -> Work | None:
            with self._changed:
                work = getattr(self._group, name)(*arguments)
                self._changed.notify_all()
            return work and ThreadedWork(work, self._changed, lambda: self._group._rendezvous.aborted)

        return call


class ThreadedWork(Work):
    def __init__(self, work: Work, changed: threading.Condition, aborted: Callable[[], bool]) -> None:
        self._work, self._changed, self._aborted = work, changed, aborted

    def wait(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._work.is_finished() or self._aborted(), WAIT_SECONDS):
                raise TimeoutError("Not all ranks have started this operation.")
            if not self._work.is_finished():
                raise TimeoutError("Aborted.")
            self._work.wait()

    def is_finished(self) -> bool:
        with self._changed:
            return self._work.is_finished()


def on_threads(functions: Sequence[Callable[[], T]]) -> list[T]:
    """What they return, each in a thread of its own; the first error of any, once all have ended."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

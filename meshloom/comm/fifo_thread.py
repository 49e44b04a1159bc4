"""A thread that runs functions one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class FifoThread:
    """Whoever makes it ends it. It does not keep a process from ending: what other ranks never join would do
    so for ever."""

    def __init__(self, name: str) -> None:
        self._line: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """What `function` gives, when those before it have run."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._line.put(run)
        return future

    def end(self) -> None:
        """After what was submitted so far."""
        self._line.put(None)

    def ended_within(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (run := self._line.get()) is not None:
            run()
            del run  # with the tensors that it holds

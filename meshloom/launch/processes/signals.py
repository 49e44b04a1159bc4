"""Signals that ask this process to end, noted so that children are ended or state is saved first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# signals within it are one request: the terminal and the parent process may both deliver one Ctrl-C
ONE_REQUEST_SECONDS = 1.0


@contextmanager
def noted_signals() -> Generator[list[int]]:
    """Collects the signals that ask this process to end, but for ignored ones (nohup), instead of ending."""
    received: list[int] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in ASKING:
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequests:
    """The signals that ask a training loop to end, noted from its first step on.

    Before that, and at a second one, they have their usual effect. The user's own handlers stay, and ignored
    signals (nohup) stay ignored. received: the first, once it has come. armed: whether they are noted now.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self.armed = False
        self._since = 0.0

    def open(self) -> None:
        """Before data workers are started: Ctrl-C in a terminal is not for them."""
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._note)

    def arm(self) -> None:
        """From now on there is state to save."""
        self.armed = bool(self._previous)

    def close(self) -> None:
        """Restore the handlers."""
        self.armed = False
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # a process that was forked
            if number != signal.SIGINT:
                _obey(number, signal.SIG_DFL)
        elif self.armed and not self.received:
            self._since = time.monotonic()
            self.received.append(number)
        elif not self.armed or time.monotonic() > self._since + ONE_REQUEST_SECONDS:
            _obey(number, self._previous.get(number, signal.SIG_DFL))


def _obey(number: int, handler: Any) -> None:
    signal.signal(number, handler)
    os.kill(os.getpid(), number)

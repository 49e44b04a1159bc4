"""Signals that ask this process to end, noted instead of obeyed, so that what it has started is ended first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_signals() -> Generator[list[int]]:
    """The signals that asked this process to end, in a list, instead of what they usually do. One that is ignored (nohup) stays so."""
    received: list[int] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

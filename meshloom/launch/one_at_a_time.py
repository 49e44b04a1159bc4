"""Trainers of one process work one at a time: random number generators are shared by all threads."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from meshloom.core.errors import TrainingError
from meshloom.launch.environment import is_rank

_WORKING = threading.RLock()  # held by the Trainer that draws


@contextmanager
def working_alone() -> Generator[None]:
    """Around random draws and communication: Trainers of other threads wait.

    With other processes it is an error: each process might let another Trainer go first.
    """
    if not _WORKING.acquire(blocking=False) and not _WORKING.acquire(blocking=not is_rank()):
        raise TrainingError(
            "Another thread of this rank is in the middle of a step of its Trainer, and ranks would wait for each other for ever. "
            "Use one Trainer after the other, or one program for each."
        )
    try:
        yield
    finally:
        _WORKING.release()

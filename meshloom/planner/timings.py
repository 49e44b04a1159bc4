"""What the phases of a description take, each without those inside of it."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager


class Timings:
    """CPU seconds of this process, by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inside = [0.0]  # of each phase that is open, what those inside of it took

    @property
    def seconds(self) -> Mapping[str, float]:
        """Phase -> CPU seconds, in the order in which phases first ended."""
        return dict(self._seconds)

    @contextmanager
    def of(self, phase: str) -> Generator[None]:
        """What is done within belongs to `phase`."""
        started = time.process_time()
        self._inside.append(0.0)
        try:
            yield
        finally:
            taken = time.process_time() - started
            own = taken - self._inside.pop()
            self._inside[-1] += taken
            self._seconds[phase] = self._seconds.get(phase, 0.0) + own

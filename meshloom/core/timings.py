"""What the phases of a description or of a start take, each without those inside of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager


class Timings:
    """Seconds by phase. clock: in which they are counted; default: those that this process computes."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.process_time
        self._seconds: dict[str, float] = {}
        self._inside = [0.0]  # of each phase that is open, what those inside of it took
        self.notes: list[str] = []  # sentences that belong to them

    @property
    def seconds(self) -> Mapping[str, float]:
        """Phase -> its seconds, in the order in which phases first ended."""
        return dict(self._seconds)

    @contextmanager
    def of(self, phase: str) -> Generator[None]:
        """What is done within belongs to `phase`."""
        started = self._clock()
        self._inside.append(0.0)
        try:
            yield
        finally:
            taken = self._clock() - started
            own = taken - self._inside.pop()
            self._inside[-1] += taken
            self.add(phase, own)

    def add(self, phase: str, seconds: float) -> None:
        """What was measured otherwise."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def told(self) -> str:
        """Phases and their sum as text, and the notes."""
        phases = ", ".join(f"{phase} {taken:.1f}" for phase, taken in self._seconds.items())
        return " ".join([f"{phases}; {sum(self._seconds.values()):.1f} in all.", *self.notes])

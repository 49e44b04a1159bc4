"""Seconds of the phases of a description or of a start, each without the phases nested in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager


class Timings:
    """Seconds by phase.

    clock: its seconds are counted. Default: this process's CPU time. entered: called with the innermost phase that is open
    whenever that is another one, None where none is. counted: called with how much of that phase is done, and how much there
    is, where that is known.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.process_time
        self._seconds: dict[str, float] = {}
        self._nested = [0.0]  # seconds of the phases inside each phase that is open
        self._open: list[str] = []
        self.entered: Callable[[str | None], None] = lambda phase: None
        self.counted: Callable[[int, int], None] = lambda done, of: None
        self.notes: list[str] = []  # sentences to print after the seconds, each once

    @property
    def seconds(self) -> Mapping[str, float]:
        """Phase -> its seconds, in the order in which phases first ended."""
        return dict(self._seconds)

    @contextmanager
    def of(self, phase: str) -> Generator[None]:
        """Count what runs inside the context as `phase`."""
        started = self._clock()
        self._nested.append(0.0)
        self._open.append(phase)
        self.entered(phase)
        try:
            yield
        finally:
            self._open.pop()
            self.entered(self._open[-1] if self._open else None)
            elapsed = self._clock() - started
            own = elapsed - self._nested.pop()
            self._nested[-1] += elapsed
            self.add(phase, own)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def summary(self) -> str:
        """Phases and their sum as text, then the notes."""
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._seconds.items())
        return " ".join([f"{phases}; {sum(self._seconds.values()):.1f} in all.", *self.notes])

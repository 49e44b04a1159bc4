"""How a run stands after a step, and who is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _say(text: str) -> None:
    sys.stderr.write(f"meshloom: {text}\n")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How a run stands after a step.

    age: of an asynchronous run, how many updates old the parameters behind the newest gradients were, on
        average. virtual_seconds: its clock, if virtual.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float | None
    learning_rates: list[float]
    samples_per_second: float
    tokens_per_second: float | None
    seconds_left: float
    memory_bytes: int
    age: float | None = None
    virtual_seconds: float | None = None


@dataclass
class Listener:
    """Who is told how a run goes; each is called on the process of rank 0 only.

    started: the plan, and which devices it runs on and why. step: after every step. evaluated, saved: step
        and what came of it.
    note: what the user should know, once.
    """

    started: Callable[[str], None] = _say
    step: Callable[[Progress], None] = lambda progress: None
    evaluated: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    saved: Callable[[int, Path], None] = lambda step, path: None
    note: Callable[[str], None] = _say


QUIET = Listener(started=lambda text: None, note=lambda text: None)  # hears and says nothing

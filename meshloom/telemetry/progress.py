"""The progress of a run after a step, and the listener that receives it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshloom.core.losses.loss_scale import LossScale


def _say(text: str) -> None:
    sys.stderr.write(f"meshloom: {text}\n")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run after a step.

    age: in asynchronous runs, the mean number of updates since the parameters of the newest gradients.
        virtual_seconds: the virtual clock, if there is one. losses: of a job of several, the newest of each by name;
        `loss` is that of the first. loss_scale: of the next step, if the plan's precision has one. logged: by the loss
        (`meshloom.log`), means over the global batch by name.
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
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    loss_scale: LossScale | None = None
    logged: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass
class Listener:
    """Callbacks of a run, called in the process of rank 0 only.

    started: with the plan, its devices and their reason. step: after every step. evaluated, saved: with the
        step and the result. note: with a message to the user, once.
    """

    started: Callable[[str], None] = _say
    step: Callable[[Progress], None] = lambda progress: None
    evaluated: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    saved: Callable[[int, Path], None] = lambda step, path: None
    note: Callable[[str], None] = _say


QUIET = Listener(started=lambda text: None, note=lambda text: None)  # prints nothing

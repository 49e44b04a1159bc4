"""The progress of a run after a step, and the listener that receives it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from meshloom.core.losses.loss_scale import LossScale
from meshloom.telemetry.summary import Summary


def _say(text: str) -> None:
    sys.stderr.write(f"meshloom: {text}\n")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run after a step.

    age: in asynchronous runs, the mean number of updates since the parameters of the newest gradients.
        virtual_seconds: the virtual clock, if there is one. loss_scale: of the next step, if the plan's precision has one. logged: by the loss
        (`meshloom.log`), means over the global batch by name. saving: how much of a checkpoint that is written in the
        background rank 0 has written of its part, 0 to 1; None: none is under way.
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
    loss_scale: LossScale | None = None
    logged: Mapping[str, float] = field(default_factory=dict[str, float])
    saving: float | None = None


def unheard(progress: Progress) -> None:
    """Nobody listens to steps, which makes their progress needless."""


@dataclass
class Listener:
    """What is called at the events of a run, in the process of rank 0 only, in this order:

    started: once, before the first step, with the plan, its devices and their reason.
    note: with a message to the user, whenever there is one; each once.
    step: after every step, with its `Progress`. With clipping on a GPU it comes after the step that follows.
    evaluated: after an evaluation, with the number of steps done and each metric's value by name.
    saved: once a checkpoint is whole, with the number of steps done and its path; also of one in best/.
    ended: once, after the last step of `fit()`, with the run's `Summary`. Not after an error.

    An error that a function raises ends the run. Several listeners of a run are called one after another, in the order
    in which they were given: `Trainer(listener=[mine, yours])`.
    """

    started: Callable[[str], None] = _say
    step: Callable[[Progress], None] = unheard
    evaluated: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    saved: Callable[[int, Path], None] = lambda step, path: None
    note: Callable[[str], None] = _say
    ended: Callable[[Summary], None] = lambda summary: None


def all_of(listeners: Sequence[Listener]) -> Listener:
    """One listener that calls several, in order.

    >>> said = []
    >>> all_of([Listener(note=said.append), Listener(note=lambda text: said.append(text.upper()))]).note("hm")
    >>> said
    ['hm', 'HM']
    """

    def each(event: str) -> Any:
        def call(*values: Any) -> None:
            for listener in listeners:
                getattr(listener, event)(*values)

        return call

    return Listener(**{event.name: each(event.name) for event in fields(Listener)})


QUIET = Listener(started=lambda text: None, note=lambda text: None)  # prints nothing

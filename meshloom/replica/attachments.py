"""The points of a step at which a feature may act. What only some jobs need attaches itself there, once, when a rank's step has been
built; a job that does not use it never enters its file.

    begin(step)                    before the first chunk
    around(step)                   a context of all chunks
    chunks_done(samples)           this replica's gradients are there, and no rank has begun to update; samples of it
    synced(step, gradients)        those that the update takes; None: used nowhere
    checked(step)                  the loss is finite
    computed(found)                the first half is over, on all ranks together
    published(found)               all ranks have the new values
    updated(result)                the second half is over, on all ranks together
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from meshloom.telemetry.step_result import StepResult

Averaged = list[Tensor | None]


class Attachments:
    """What is called at each point, in this order."""

    def __init__(self) -> None:
        self.begin: list[Callable[[int], None]] = []
        self.around: list[Callable[[int], AbstractContextManager[None]]] = []
        self.chunks_done: list[Callable[[int], None]] = []
        self.synced: list[Callable[[int, Averaged], Averaged]] = []
        self.checked: list[Callable[[int], None]] = []
        self.computed: list[Callable[[Any], None]] = []
        self.published: list[Callable[[Any], None]] = []
        self.updated: list[Callable[[StepResult], None]] = []

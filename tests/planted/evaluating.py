"""Bugs of evaluations: of the step and the draws that metrics see, and of averages in place of parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import meshloom.replica.metrics
from meshloom.optimizer.averages import ParameterAverages
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from tests.planted.bugs import Patch, bug, wrap

EVALUATION = "evaluation"


@bug("fourth/step_in_metrics", "metric of the step", "dp=2", phase=EVALUATION, quick=True)
def step_in_metrics(patch: Patch) -> None:
    """In a metric `meshloom.step()` is the number of the evaluation's batch, not of the updates."""
    wrap(patch, ChunkScope, "evaluation", lambda right, self, chunk, updates: right(self, chunk, chunk.step))


@bug("seventh/second_metric_goes_on_drawing", "two noisy metrics", "dp=2", phase=EVALUATION)
def second_metric_goes_on_drawing(patch: Patch) -> None:
    """Torch is seeded once for all metrics of a chunk, so that the second draws what follows the first one's draws."""
    last: dict[int, Any] = {}

    def seed(right: Any, self: ChunkScope, moment: Any) -> None:
        if last.get(id(self)) is not moment:
            right(self, moment)
        last[id(self)] = moment

    wrap(patch, ChunkScope, "seed", seed)


def publishes_once(patch: Patch, which: int) -> None:
    """Of the two times that an evaluation makes owned slices visible, averages and then parameters, only this one."""
    times: Counter[int] = Counter()

    def publish(right: Any, self: ParameterAverages) -> Any:
        times[id(self)] += 1
        if times[id(self)] % 2 == which % 2:
            right(self)

    wrap(patch, ParameterAverages, "publish", publish)


@bug("fifth/average_unseen", "averages", "dp=2,zero=1", phase="step 1", module="first")
def average_unseen(patch: Patch) -> None:
    """A replica evaluates averages of its own slices with parameters of the others'."""
    publishes_once(patch, 2)


@bug("fourth/ema_not_published", "averages", "dp=2,zero=1", phase="step 1")
def ema_not_published(patch: Patch) -> None:
    """After an evaluation of averages replicas do not get the others' parameters back."""
    publishes_once(patch, 1)


@bug("sixth/borrowers_evaluate_without_averages", "tied with averages", "pp=2,microbatches=2,cuts=blocks.2", phase="step 1")  # fmt: skip
def borrowers_evaluate_without_averages(patch: Patch) -> None:
    """While averages are evaluated, a stage that borrows a tied parameter has its trained value."""
    shown: set[int] = set()

    def show(right: Any, replica: Any, averages: Any) -> Any:
        shown.add(id(replica.engine))
        return right(replica, averages)

    def refresh(right: Any, self: Engine) -> Any:
        if id(self) in shown:
            shown.remove(id(self))
        else:
            right(self)

    wrap(patch, meshloom.replica.metrics, "show_averages", show)
    wrap(patch, Engine, "refresh_borrowed", refresh)

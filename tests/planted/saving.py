"""Bugs of what checkpoints hold, and of what a run resumes with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

import meshloom.optimizer.optimizer_state
import meshloom.replica.replica_state
from meshloom.optimizer.averages import ParameterAverages
from meshloom.replica.replica_state import SCALE
from tests.planted.bugs import Patch, bug, wrap

CHECKPOINT = "checkpoint"


def without_scale(patch: Patch, put: Any) -> None:
    """`put` is given a checkpoint's values, and the loss scale that is taken from them."""

    def saved(right: Any, replica: Any) -> Any:
        pieces, values = right(replica)
        if SCALE in values:
            put(values, values.pop(SCALE))
        return pieces, values

    wrap(patch, meshloom.replica.replica_state, "run_state", saved)


@bug("fourth/scale_not_saved", "overflowing", "dp=2,precision=fp16-mixed", phase=CHECKPOINT, quick=True)
def scale_not_saved(patch: Patch) -> None:
    """Checkpoints lack the loss scale."""
    without_scale(patch, lambda values, scale: None)


@bug("sixth/loss_scale_under_another_name", "overflowing", "dp=2,zero=1,precision=fp16-mixed", phase=CHECKPOINT)  # fmt: skip
def loss_scale_under_another_name(patch: Patch) -> None:
    """The loss scale is saved under a name that resuming does not look for."""
    without_scale(patch, lambda values, scale: values.update(scale=scale))


@bug("ninth/scale_starts_anew", "overflowing", "dp=2,precision=fp16-mixed", phase=CHECKPOINT)
def scale_starts_anew(patch: Patch) -> None:
    """On resuming the loss scale is the first one again."""

    def loader(right: Any, replica: Any, checkpoint: Any) -> Any:
        found = right(replica, checkpoint)

        def finish() -> None:
            scale = replica.sums.scale
            found.finish()
            replica.sums.scale = scale

        return replace(found, finish=finish)

    wrap(patch, meshloom.replica.replica_state, "loader_of", loader)


@bug("sixth/by_metric_keeps_nothing", "rate by metric", "dp=2,zero=1", phase=CHECKPOINT)
def by_metric_keeps_nothing(patch: Patch) -> None:
    """A scheduler that goes by a metric is saved without its state."""

    def values(right: Any, scheduler: Any) -> Any:
        goes_by_metric = isinstance(scheduler, ReduceLROnPlateau)
        return right(SimpleNamespace(state_dict=dict) if goes_by_metric else scheduler)

    wrap(patch, meshloom.optimizer.optimizer_state, "scheduler_values", values)


@bug("fifth/average_not_loaded", "averages", "dp=2", phase=CHECKPOINT, quick=True)
def average_not_loaded(patch: Patch) -> None:
    """Averages of parameters start anew when a run resumes."""
    wrap(patch, ParameterAverages, "load", lambda right, self, *given: None)

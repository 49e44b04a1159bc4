"""Bugs of updates: clipping, schedulers that go by a metric."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import meshloom.optimizer.clipping
import meshloom.optimizer.updater
from meshloom.core.job_functions import ByMetric
from tests.planted.bugs import Patch, bug, wrap


@bug("seventh/norm_without_last_block", "wide", "dp=2,microbatches=2", quick=True)
def norm_without_last_block(patch: Patch) -> None:
    """Of a gradient of more than 1,024 elements what is left after whole blocks is not counted in the norm that clips."""

    def norms(right: Any, gradient: Tensor) -> list[Tensor]:
        found = right(gradient)
        return found[:1] if gradient.numel() > 1024 else found

    wrap(patch, meshloom.optimizer.clipping, "_block_norms", norms)


@bug("fifth/norm_of_stage", "clipped", "pp=2")
def norm_of_stage(patch: Patch) -> None:
    """Each stage clips by the norm of its own gradients."""
    right = meshloom.optimizer.updater.clip
    patch.setattr(
        meshloom.optimizer.updater, "clip", lambda *given, **more: right(*given, **{**more, "holders": []})
    )


@bug("eighth/by_metric_without_function", "rate by metric", "dp=2", phase="step 1")
def by_metric_without_function(patch: Patch) -> None:
    """A scheduler that goes by a metric is given the metric itself, without the function of it."""

    wrap(patch, ByMetric, "value", lambda right, self, metrics: metrics[self.metric])

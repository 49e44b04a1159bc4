"""The best value of a metric so far, and when training that no longer improves it stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class BestMetric:
    """metric: its name. largest: whether larger is better. patience: evaluations without a better value after which
    training stops; None: it does not. value, step: the best so far, and after which step; 0: there is none yet.
    waited: evaluations since.

    >>> best = BestMetric.of("loss:min", patience=2).after(10, {"loss": 0.5}).after(20, {"loss": 0.7})
    >>> best.step, best.waited, best.stops, best.after(30, {"loss": math.nan}).stops
    (10, 1, False, True)
    """

    metric: str
    largest: bool
    patience: int | None = None
    value: float = math.nan
    step: int = 0
    waited: int = 0

    @classmethod
    def of(cls, text: str, patience: int | None) -> Self:
        """text: of `Evaluate.best`, as "accuracy:max"."""
        metric, _, which = text.rpartition(":")
        return cls(metric=metric, largest=which == "max", patience=patience)

    @property
    def stops(self) -> bool:
        """Whether training stops."""
        return self.patience is not None and self.waited >= self.patience

    def after(self, step: int, metrics: Mapping[str, float]) -> BestMetric:
        """After an evaluation at `step`. Of equal values the first is best; one that is not a number never is."""
        value = metrics[self.metric]
        better = value > self.value if self.largest else value < self.value
        if better or (not self.step and not math.isnan(value)):
            return replace(self, value=value, step=step, waited=0)
        return replace(self, waited=self.waited + 1)

    def __str__(self) -> str:
        return f"{self.metric} has not become better in {self.waited} evaluations since step {self.step} ({self.value:.6g}), and patience={self.patience}"

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "metric": self.metric,
            "value": None if math.isnan(self.value) else self.value,
            "step": self.step,
            "waited": self.waited,
        }

    def going_on(self, saved: Mapping[str, Any] | None) -> BestMetric:
        """As a checkpoint says; unless it is of another metric, which starts anew."""
        if not saved or saved["metric"] != self.metric:
            return self
        value = math.nan if saved["value"] is None else float(saved["value"])
        return replace(self, value=value, step=int(saved["step"]), waited=int(saved["waited"]))

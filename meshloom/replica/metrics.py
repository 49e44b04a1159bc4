"""Means of metrics over the chunks of an evaluation, as sums that add up over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from meshloom.core.job import LossFunction, as_sum
from meshloom.data.chunks import Chunk
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class MetricSums:
    """sums: each metric's values and their weights; float64 [metrics, 2]."""

    def __init__(self, metrics: Mapping[str, LossFunction], device: torch.device) -> None:
        self.sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
        self._rows = dict(zip(metrics, self.sums, strict=True))

    def add(self, name: str, chunk: Chunk, returned: Any) -> None:
        """What a metric returned for a chunk; a plain number, as `.item()` gives it, is as good as a scalar
        tensor."""
        value, weight = as_sum(_as_tensor(returned), chunk.samples, needs_gradient=False, who="The metric")
        both = [value.double(), torch.as_tensor(weight, dtype=torch.float64, device=value.device)]
        self._rows[name] += torch.stack(both).to(self.sums.device)  # a plain number lies nowhere

    def means(self) -> dict[str, float]:
        """By name; nan where there is no weight."""
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(self._rows, self.sums.tolist(), strict=True)
        }


def expected_bytes(metrics: Mapping[str, LossFunction]) -> ExpectedBytes:
    """Of an evaluation over several replicas."""
    return ExpectedBytes(per_evaluation=Traffic.along("dp", all_reduce=16 * len(metrics)))


def _as_tensor(returned: Any) -> Any:
    if isinstance(returned, tuple) and len(returned) == 2:
        return _as_tensor(returned[0]), returned[1]
    return torch.tensor(returned, dtype=torch.float64) if isinstance(returned, int | float) else returned

"""Moving averages of parameters, compared with what they are by definition."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.float64_blocks import distance, norm


class AverageErrors:
    """One device's averages: decay * average + (1 - decay) * parameter, in float64."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._averages: dict[str, Tensor] = {}
        self.errors: list[TensorError] = []  # of the newest step

    @property
    def values(self) -> Mapping[str, Tensor]:
        """By name, in float64."""
        return self._averages

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """After a step's update. parameters: one device's."""
        self.errors = []
        for name, each in parameters.items():
            if each.requires_grad:
                known = self._averages.get(name)
                if known is None:
                    self._averages[name] = each.detach().to(torch.float64, copy=True)
                    continue
                # in place, as an embedding may be the largest tensor by far
                known.mul_(self._decay).add_(each.detach(), alpha=1 - self._decay)

    def compare(self, name: str, ours: Tensor, step: int, tolerance: float) -> None:
        """The plan's average of a parameter; buffers and frozen parameters have none."""
        if name not in self._averages:
            return
        expected = self._averages[name]
        error = distance(ours, expected) / max(norm(expected), torch.finfo(torch.float32).tiny)
        self.errors.append(
            TensorError(name=name, kind="average", step=step, error=error, tolerance=tolerance)
        )

"""Moving averages of parameters, compared with what they are by definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import TensorError


class AverageErrors:
    """One device's averages: decay * average + (1 - decay) * parameter, in float64."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._averages: dict[str, Tensor] = {}
        self.errors: list[TensorError] = []  # of the newest step

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """After a step's update. parameters: one device's."""
        self.errors = []
        for name, each in parameters.items():
            if each.requires_grad:
                value = each.detach().to(torch.float64, copy=True)
                known = self._averages.get(name)
                self._averages[name] = (
                    value if known is None else self._decay * known + (1 - self._decay) * value
                )

    @contextmanager
    def in_place_of(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which one device's parameters are the averages, as in evaluations."""
        values = {name: parameters[name].detach().clone() for name in self._averages}
        with torch.no_grad():
            try:
                for name, average in self._averages.items():
                    parameters[name].copy_(average)
                yield
            finally:
                for name, value in values.items():
                    parameters[name].copy_(value)

    def compare(self, name: str, ours: Tensor, step: int, tolerance: float) -> None:
        """The plan's average of a parameter; buffers and frozen parameters have none."""
        if name not in self._averages:
            return
        expected = self._averages[name]
        size = max(float(expected.norm()), torch.finfo(torch.float32).tiny)
        error = float((ours.double() - expected).norm()) / size
        self.errors.append(
            TensorError(
                name=name,
                kind="average",
                step=step,
                error=error,
                tolerance=tolerance,
                elements=expected.numel(),
            )
        )

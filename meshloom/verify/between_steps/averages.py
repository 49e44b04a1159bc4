"""Moving averages of parameters, compared with what they are by definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.float64_blocks import distance, norm
from meshloom.verify.reference.mistakes import Cause

_EXPLAINED = 0.03  # of the error, that may be left
_SMALL = 2**22  # parameters of a model of which averages of the step before are kept


class AverageErrors:
    """One device's averages: decay * average + (1 - decay) * parameter, in float64."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._averages: dict[str, Tensor] = {}
        self.errors: list[TensorError] = []  # of the newest step
        self._parameters: Mapping[str, Tensor] = {}
        self._moved: dict[str, tuple[float, float]] = {}  # of wrong ones: times of the way, what is left
        self._begin = True  # in the first update
        self._start: Mapping[str, Tensor] = {}  # parameters before the update
        self._earlier: dict[str, Tensor] = {}  # averages of the step before
        # of wrong ones, which of `_other_ways` give it
        self._ways: list[set[str]] = []
        # of wrong ones: the share of elements that are the parameter's; 0.0: others are wrong, too
        self._replaced: list[float] = []

    @property
    def values(self) -> Mapping[str, Tensor]:
        """By name, in float64."""
        return self._averages

    def begin(self, parameters: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None) -> None:
        """After a step's update. parameters: one device's; before: as they were before that."""
        self.errors, self._moved, self._parameters = [], {}, parameters
        self._start, self._ways, self._replaced = before or {}, [], []
        small = sum(each.numel() for each in parameters.values()) <= _SMALL
        self._begin = not self._averages
        for name, each in parameters.items():
            if each.requires_grad:
                known = self._averages.get(name)
                if known is None:
                    self._averages[name] = each.detach().to(torch.float64, copy=True)
                    continue
                if small:
                    self._earlier[name] = known.clone()
                # in place, as an embedding may be the largest tensor by far
                known.mul_(self._decay).add_(each.detach(), alpha=1 - self._decay)

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
        error = distance(ours, expected) / max(norm(expected), torch.finfo(torch.float32).tiny)
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
        if not self.errors[-1].passed:
            self._moved[name] = self._way(name, ours.double(), expected)
            off = float((ours.double() - expected).norm())
            self._replaced.append(self._share_of_parameter(name, ours.double(), expected))
            ways = self._other_ways(name, expected)
            self._ways.append(
                {why for why, value in ways if float((ours.double() - value).norm()) < _EXPLAINED * off}
            )

    def _other_ways(self, name: str, expected: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Why it might be another one, and what it would be then."""
        now, start, decay = self._parameters[name].detach().double(), self._start.get(name), self._decay
        known = self._earlier.get(name)
        if start is not None:
            start = start.double()
            if known is not None:
                late = decay * known + (1 - decay) * start
                yield "they move towards the parameters of before the update", late
            else:
                moved = decay * start + (1 - decay) * now
                yield (
                    "they have begun as the parameters of before this update, in a step that made no update or before the first",
                    moved,
                )
        if known is not None:
            yield "they miss this update, and are as they were before it", known
            yield "they have moved once more than there were updates", decay * expected + (1 - decay) * now

    def _share_of_parameter(self, name: str, ours: Tensor, expected: Tensor) -> float:
        """The share of elements that are not the average; 0.0 where some of them are not the parameter's, either."""
        now = self._parameters[name].detach().double()
        wrong = (ours - expected).abs() > _EXPLAINED * (now - expected).abs()
        of_parameter = (ours - now).abs() <= _EXPLAINED * (now - expected).abs()
        return float(wrong.double().mean()) if bool((~wrong | of_parameter).all()) else 0.0

    def _way(self, name: str, ours: Tensor, expected: Tensor) -> tuple[float, float]:
        """How many times as far from the parameter ours is as it should be, and what is left of the error. In the first update, when the
        average is the parameter, the way is from 0."""
        now = self._parameters[name].detach().double()
        start = torch.zeros_like(now) if self._begin else now
        way = expected - start
        times = float(((ours - start) * way).sum() / way.square().sum().clamp_min(1e-300))
        left = float((ours - start - times * way).norm() / (ours - expected).norm().clamp_min(1e-300))
        return times, left

    def cause(self) -> Cause | None:
        """Of the wrong ones of the newest step; None: all agree."""
        if not self._moved:
            return None
        names = ", ".join(list(self._moved)[:3]) + (", ..." if len(self._moved) > 3 else "")
        times = [each for each, left in self._moved.values() if left < _EXPLAINED]
        what = f"Parameters agree, and their moving averages do not ({names})"
        alike = len(times) == len(self._moved) and max(times) - min(times) < 0.01
        if known := [each for each in self._ways[0] if all(each in ways for ways in self._ways)]:
            why = known[0]
        elif (
            all(self._replaced)
            and not self._begin
            and (min(self._replaced) < 1 or len(self._moved) < len(self.errors))
        ):
            why = "some of them, or parts of each, are the parameters: averages that other ranks keep do not come in their place"
        elif alike and self._begin:
            why = f"they are {times[0]:.4g} times the parameters, as which they begin"
        elif alike and abs(times[0]) < 0.01:
            why = "they are the parameters, as if nothing were averaged, or averages not put in their place"
        elif alike:
            why = f"they are {times[0]:.4g} times as far from the parameters as with decay {self._decay:g}: they move with another decay, or begin elsewhere"
        else:
            why = f"with decay {self._decay:g} they would be others: they miss an update, have moved without one, or are those of other parameters"
        return Cause("averages", f"{what}: {why}.")

"""How far a plan's gradients are from one device's, one by one, and how far rounding explains it.

The error of a gradient is ||a - b|| / ||b||, where a is the plan's and b the reference's: each is judged by its own
norm. It passes up to the first of these that suffices, and what costs a rerun is only asked where the others do not:

    32 units in the last place
    8 times what rounding does to it: how far it moves when one device is rerun with its parameters perturbed by a few
        units (`reruns.rounding_effect`), up to the most that is put down to rounding in its precision
    that movement itself, or that of another gradient which moves beyond the most: where a ReLU flips in the rerun, it
        might have flipped here in the plan
    the same with a rerun in which outputs of modules are perturbed in place of parameters (`reruns.outputs_effect`), and with one in which
        they are perturbed by more, and the movement is divided by that: a sum of few terms that cancel may not move by rounding
    8 times what rounding does in backward (`reruns.backward_effect`): as it moves the terms of which a gradient is the sum, it is as large as
        these, and where they cancel the gradient is nothing but rounding. No ReLU flips there, so that is all that it may be

A gradient that is no larger than what it may be off by is noise: its size alone is compared, and no factor is looked for in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.float64_blocks import float64_blocks, gradient_distance, norm, relative
from meshloom.verify.tolerances.of_precision import most_tolerated, unmeasured

Gradients = Mapping[str, Tensor | None]
Measure = Callable[[], Mapping[str, float]]
FLOOR = 1e-3  # of the largest gradient: below it what moves says nothing of other gradients
TIMES = 8  # the measured effect is one draw of the plan's rounding, and some norms are of few elements
_CANCELLED_UNITS = 16  # of the largest gradient, by which one that is small as large terms cancel may be off


def relative_errors(ours: Gradients, right: Gradients) -> dict[str, float]:
    """By name, ||a - b|| / max(||b||, a thousandth of the largest norm); infinite for what is on one side alone. What is None on both is left out."""
    norms = {name: norm(each) for name, each in right.items() if each is not None}
    floor, found = FLOOR * max(norms.values(), default=0.0), dict[str, float]()
    for name in {**right, **ours}:
        here, there = ours.get(name), right.get(name)
        if here is not None and there is not None:
            off = gradient_distance(here.to_dense(), there.to_dense())
            found[name] = relative(off, max(norms[name], floor))
        elif here is not there:
            found[name] = math.inf
    return found


class GradientErrors:
    """The errors of one step's averaged gradients, which arrive one by one.

    reference: its gradients by name; one may be changed after it was compared. precision: that of which some units are rounding; None: of
    each gradient its own. partial_sums: by how much of the largest gradient those that the plan rounds move any. travels: how far rounding on
    the way between replicas moves gradients that do not cancel there, relative to their size. measures, of_terms, measure_travels: each called at
    most once; by name how far gradients move. of_terms: where the terms are moved of which they are sums.
    """

    def __init__(
        self,
        reference: Gradients,
        step: int,
        *,
        precision: torch.dtype | None = None,
        partial_sums: float = 0.0,
        travels: float = 0.0,
        measures: Sequence[Measure] = (),
        of_terms: Measure | None = None,
        measure_travels: Measure = dict[str, float],
    ) -> None:
        self.norms = {name: norm(each) for name, each in reference.items() if each is not None}
        self._reference, self._own_precision = reference, precision
        self._partial_sums, self._travels = partial_sums, travels
        self._measures = [*measures, *([of_terms] if of_terms else [])]
        self._of_terms, self._measured_travels = of_terms, cache(measure_travels)
        self._largest = max(self.norms.values(), default=0.0)
        self._effects: list[Mapping[str, float]] = []  # of the measures so far
        self._error = partial(TensorError, kind="gradient", step=step)
        self._grown = 0.0  # the largest effect beyond what is tolerated, relative to its gradient
        self._compared: dict[str, TensorError] = {}

    @property
    def grows(self) -> bool:
        """Whether rounding was measured to move a gradient beyond what is tolerated."""
        return self._grown > 0

    def compare(self, name: str, ours: Tensor | None) -> TensorError:
        """The error of the plan's next gradient."""
        right, own = self._reference.get(name), self.norms.get(name, 0.0)
        off, allowed = self._distance(name, ours, right), self._unmeasured(name)
        if allowed < off < math.inf:
            most = self._most(name)
            if off > allowed and self._travels:
                allowed = max(allowed, self._measured_travels().get(name, 0.0))
            for number, measure in enumerate(self._measures):
                if off > allowed:
                    effect = self._rounding_effect(name, number)
                    if measure is self._of_terms and TIMES * effect >= own:
                        most = math.inf
                    allowed = max(allowed, min(TIMES * effect, most), effect, self._grown * self._size(name))
        moved = off < math.inf and allowed > self._most(name)
        size = own or self._largest or 1.0
        noise = 0 < off < math.inf and allowed >= own
        found = self._error(name=name, error=off / size, tolerance=allowed / size, moved=moved, noise=noise)
        self._compared[name] = found
        return found

    def errors(self) -> list[TensorError]:
        """The errors of all gradients; infinite for those that did not arrive."""
        return [
            self._compared.get(name) or self._error(name=name, error=math.inf, tolerance=0.0)
            for name in dict.fromkeys([*self._reference, *self._compared])
        ]

    def _distance(self, name: str, ours: Tensor | None, reference: Tensor | None) -> float:
        if name not in self._reference:
            return math.inf
        if ours is None or reference is None:
            return 0.0 if ours is reference else math.inf
        values = reference.coalesce().values() if reference.is_sparse else reference.to_dense()
        if not all(bool(block.isfinite().all()) for block in float64_blocks(values)):
            return math.inf
        off = gradient_distance(ours, reference)
        return off if math.isfinite(off) else math.inf

    def _unmeasured(self, name: str) -> float:
        share = unmeasured(self._precision(name)) + self._travels
        return share * self.norms.get(name, 0.0) + self._partial_sums * self._largest

    def _most(self, name: str) -> float:
        # A gradient that is small because large terms cancel has their rounding error.
        precision = self._precision(name)
        cancelled = max(_CANCELLED_UNITS * torch.finfo(precision).eps, self._partial_sums)
        share = most_tolerated(precision) + self._travels
        return share * self._size(name) + cancelled * self._largest

    def _precision(self, name: str) -> torch.dtype:
        reference = self._reference.get(name)
        own = torch.float64 if reference is None else reference.dtype.to_real()
        return self._own_precision or own

    def _size(self, name: str) -> float:
        return max(self.norms.get(name, 0.0), FLOOR * self._largest)

    def _rounding_effect(self, name: str, number: int) -> float:
        if number == len(self._effects):
            effects = self._measures[number]()
            self._effects.append(effects)
            for each, effect in effects.items():
                if self._most(each) < effect < math.inf:
                    self._grown = max(self._grown, effect / self._size(each))
        return self._effects[number].get(name, 0.0)

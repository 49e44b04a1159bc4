"""How far a plan's step is from one device's, tensor by tensor, and what counts as rounding.

The error of a tensor is ||a - b|| / max(||b||, 1e-3 * largest norm of its kind in this step): what is small beside the rest
is measured by the rest. a is the plan's, b is one device's.

    loss        |a - b| / mean size of a chunk's loss
    norm        of the whole gradient before clipping
    gradient    averaged, before clipping; None on one side only is an infinite error, and so are other rows of a sparse one
    buffer      after the step; integers must be equal
    parameter   after the step
    update      the parameter's change in this step, which shows what a small learning rate hides in the parameter

An error counts as rounding up to a tolerance of the precision. Above it, a gradient still agrees if it is no
further from one device's than one device's own goes, or one of them beyond its tolerance, when the parameters
are moved at random by a few units of rounding (`reruns.rounding_effect`).

Elements of a buffer or parameter that are infinite or NaN (a mask of -inf) must be the same on both sides and
count in no norm. A gradient that is not finite never agrees.

An optimizer that divides by the gradient's size turns rounding into a full step wherever a gradient is
nothing but rounding
(a bias before batch norm, the bias of attention keys), and what comes of it spreads: into running means, and
through
optimizers that look at a whole tensor into its other elements. So one device is given each of the plan's
gradients that agrees
to update with, and goes on from the plan's parameters once they agree, too: then every element can be
compared, and neither run drifts from the other.

Tensors come one by one and are compared as they come: nobody keeps a step's gradients or parameters beside
the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.compare_chunks import facts_of, first_module
from meshloom.verify.reference.float64_blocks import distance, float64_blocks, norm, same_rows
from meshloom.verify.reference.step_records import Cast, StepRecord

Kind = Literal["loss", "norm", "gradient", "buffer", "parameter", "update"]
Gradients = Mapping[str, Tensor | None]
FLOOR = 1e-3
ROUNDING_UNITS = 16

# float64: what is asked of verification. The others: correct runs stay well below (see tests/test_verify.py),
# the smallest
# mistakes worth the name lie above (a mean of means over 17, 17, 16 and 16 samples is off by some 1e-2).
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """One comparison of a tensor of so many elements. moved: the tolerance is what moving one device's
    parameters by rounding does to it."""

    name: str
    kind: Kind
    step: int
    error: float
    tolerance: float
    elements: int = 1
    moved: bool = False

    @property
    def passed(self) -> bool:
        """Whether the error is rounding. NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step of both sides. `facts`: what differs besides numbers, a sentence each."""

    step: int
    loss: tuple[float, float]  # the plan's, one device's
    errors: Sequence[TensorError]
    facts: Sequence[str]
    # first in order of execution whose output differs; else the last whose gradient does
    first_module: str | None

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.facts and all(error.passed for error in self.errors)

    def failed(self, kind: Kind) -> list[str]:
        """Names whose error of this kind is more than rounding."""
        return [error.name for error in self.errors if error.kind == kind and not error.passed]


@dataclass(kw_only=True)
class Comparer:
    """Compares one step after another. `precision`: of the parameters."""

    plan: Plan
    precision: torch.dtype
    _casts: set[Cast] = field(default_factory=set[Cast])

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Reductions of precision that widened a tolerance, on one device so far."""
        return tuple(sorted(self._casts, key=lambda cast: (cast.in_optimizer, cast.place, cast.dtype)))

    def tolerance(self, one: Sequence[Cast] = (), *, updated: bool = False) -> float:
        """Of what is computed before (`updated=False`) or after the optimizer of a step runs, given the casts
        of that step on one device."""
        self._casts |= set(one)
        low = [
            _TOLERANCES.get(getattr(torch, cast.dtype), 0.5)
            for cast in self._casts
            if updated or not cast.in_optimizer
        ]
        return max([_TOLERANCES[self.precision], *low])

    def compare(self, ours: StepRecord, one: StepRecord, of_tensors: Sequence[TensorError]) -> Comparison:
        """The next step. of_tensors: the errors of its gradients, buffers and parameters, which were compared
        as they came."""
        tolerance = self.tolerance(one.casts)
        errors = [*_loss_errors(ours, one, tolerance), *of_tensors]
        facts = [*facts_of(ours, one, self.plan)]
        module: str | None = None
        if facts or not all(error.passed for error in errors):
            wrong = {error.name for error in errors if error.kind == "gradient" and not error.passed}
            module = first_module(ours, one, wrong, tolerance, self.plan)
        return Comparison(
            step=one.step, loss=(ours.loss, one.loss), errors=errors, facts=facts, first_module=module
        )


def _loss_errors(ours: StepRecord, one: StepRecord, tolerance: float) -> Iterator[TensorError]:
    size = max(
        abs(one.loss), sum(abs(chunk.loss_sum) for chunk in one.chunks) / one.weight if one.weight else 0.0
    )
    yield TensorError(
        name="loss",
        kind="loss",
        step=one.step,
        error=_ratio(abs(ours.loss - one.loss), size),
        tolerance=tolerance,
    )
    if ours.gradient_norm is not None and one.gradient_norm is not None:
        error = _ratio(abs(ours.gradient_norm - one.gradient_norm), one.gradient_norm)
        yield TensorError(name="gradient norm", kind="norm", step=one.step, error=error, tolerance=tolerance)


class GradientErrors:
    """Errors of one step's averaged gradients, which come one by one.

    one: one device's, by name, which may change once they are compared. moved: asked at most once, when one
    is further off than the tolerance: by name, how far one device's go when its parameters are moved by
    rounding.
    """

    def __init__(
        self,
        one: Gradients,
        step: int,
        tolerance: float,
        moved: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.norms = {name: norm(each) for name, each in one.items() if each is not None}
        self._ask = moved
        self._moved: Mapping[str, float] | None = None
        self._elsewhere = 0.0
        self._one = one
        self._step = step
        self._tolerance = tolerance
        self._largest = max(self.norms.values(), default=0.0)
        self._found: dict[str, TensorError] = {}

    def take(self, name: str, ours: Tensor | None) -> TensorError:
        """The plan's next one."""
        error, tolerance = self._error(name, ours, self._one.get(name), self._size(name)), self._allowed(name)
        moved = 0.0 if error <= tolerance or not math.isfinite(error) else self._how_far(name)
        self._found[name] = self._made(name, error, max(tolerance, moved), moved=moved > tolerance)
        return self._found[name]

    def errors(self) -> list[TensorError]:
        """Of all; infinite if the plan's has not come."""
        return [
            self._found.get(name) or self._made(name, math.inf, self._tolerance)
            for name in dict.fromkeys([*self._one, *self._found])
        ]

    def _error(self, name: str, ours: Tensor | None, one: Tensor | None, size: float) -> float:
        if name not in self._one:
            return math.inf
        if ours is None or one is None:
            return 0.0 if ours is one else math.inf
        if ours.is_sparse and one.is_sparse:
            ours, one = ours.coalesce(), one.coalesce()
            if not same_rows(ours, one):
                return math.inf  # SparseAdam updates the rows that were used
            ours, one = ours.values(), one.values()
        if not all(bool(block.isfinite().all()) for block in float64_blocks(one.to_dense())):
            return math.inf
        return _error(ours.to_dense(), one.to_dense(), size)

    def _size(self, name: str) -> float:
        return max(self.norms.get(name, 0.0), FLOOR * self._largest)

    def _allowed(self, name: str) -> float:
        # A gradient that is small because large terms cancel carries their rounding: some units of the
        # largest gradient.
        one, size = self._one.get(name), self._size(name)
        return self._tolerance + (
            ROUNDING_UNITS * torch.finfo(one.dtype).eps * self._largest / size
            if one is not None and size
            else 0.0
        )

    def _how_far(self, name: str) -> float:
        """What moving the parameters does to it, or to another beyond its tolerance: where a relu flips in
        this run, it might have flipped here in that."""
        if self._moved is None:
            found = self._ask() if self._ask else {}
            self._moved = {each: _ratio(moved, self._size(each)) for each, moved in found.items()}
            self._elsewhere = max(
                (far for each, far in self._moved.items() if self._allowed(each) < far < math.inf),
                default=0.0,
            )
        return max(self._moved.get(name, 0.0), self._elsewhere)

    def _made(self, name: str, error: float, tolerance: float, *, moved: bool = False) -> TensorError:
        one = self._one.get(name)
        elements = 0 if one is None else one.numel()
        return TensorError(
            name=name,
            kind="gradient",
            step=self._step,
            error=error,
            tolerance=tolerance,
            elements=elements,
            moved=moved,
        )


class StateErrors:
    """Errors of one step's parameters, of their updates and of its buffers, which come one by one.

    parameters, buffers: one device's after the step, by name. before: its parameters before the update, which
    are the plan's, too. tolerance: of buffers. updated: of what the optimizer made.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        step: int,
        tolerance: float,
        updated: float,
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._step = step
        self._tolerance, self._updated = tolerance, updated
        self._norms = {name: norm(each) for name, each in parameters.items()}
        self._updates = {name: _norm_of_difference(each, before[name]) for name, each in parameters.items()}
        self._largest = max(self._norms.values(), default=0.0)
        self._largest_update = max(self._updates.values(), default=0.0)
        self._largest_buffer = max(
            (norm(each) for each in buffers.values() if _has_fractions(each)), default=0.0
        )
        self._found: dict[str, list[TensorError]] = {}

    def take(self, name: str, ours: Tensor) -> list[TensorError]:
        """The plan's next one."""
        if name in self._parameters:
            self._found[name] = self._of_parameter(name, ours)
        elif name in self._buffers:
            self._found[name] = [self._made(name, "buffer", self._of_buffer(name, ours), self._tolerance)]
        return self._found.get(name, [])

    def errors(self) -> list[TensorError]:
        """Of all of one device's; infinite if the plan's has not come."""
        of_buffers = [
            self._found.get(name) or [self._made(name, "buffer", math.inf, self._tolerance)]
            for name in self._buffers
        ]
        of_parameters = [
            self._found.get(name) or [self._made(name, "parameter", math.inf, self._updated)]
            for name in self._parameters
        ]
        return [error for errors in (*of_buffers, *of_parameters) for error in errors]

    def _of_parameter(self, name: str, ours: Tensor) -> list[TensorError]:
        one = self._parameters[name]
        error = _error(ours, one, max(self._norms[name], FLOOR * self._largest))
        if ours.shape != one.shape:
            return [self._made(name, "parameter", error, self._updated)]
        # Subtracting two parameters shows the rounding of both: half a unit each, for the plan and for one
        # device.
        size = max(self._updates[name], FLOOR * self._largest_update)
        rounding = (
            2 * torch.finfo(one.dtype).eps * self._norms[name] / size
            if size and one.is_floating_point()
            else 0.0
        )
        return [
            self._made(name, "parameter", error, self._updated),
            self._made(name, "update", _error(ours, one, size), self._updated + rounding),
        ]

    def _of_buffer(self, name: str, ours: Tensor) -> float:
        one = self._buffers[name]
        if _has_fractions(one):
            return _error(ours, one, max(norm(one), FLOOR * self._largest_buffer))
        return 0.0 if torch.equal(ours.to(one.device), one) else math.inf

    def _made(self, name: str, kind: Kind, error: float, tolerance: float) -> TensorError:
        one = self._buffers[name] if kind == "buffer" else self._parameters[name]
        return TensorError(
            name=name, kind=kind, step=self._step, error=error, tolerance=tolerance, elements=one.numel()
        )


def _error(ours: Tensor, one: Tensor, size: float) -> float:
    return _ratio(distance(ours, one), size) if ours.shape == one.shape else math.inf


def _norm_of_difference(after: Tensor, before: Tensor) -> float:
    """Of what is finite in it."""
    blocks = zip(float64_blocks(after), float64_blocks(before), strict=True)
    return math.sqrt(sum(float(torch.nan_to_num(a - b, 0.0, 0.0, 0.0).square().sum()) for a, b in blocks))


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) and math.isfinite(size) else math.inf


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

"""How far a plan's step is from one device's, tensor by tensor, and which differences count as rounding.

The error of a tensor is ||a - b|| / max(||b||, 1e-3 * largest norm of its kind in this step), where a is the
plan's tensor and b the reference's; the lower bound keeps small tensors from being held to their own size.

    loss        |a - b| / mean size of a chunk's loss
    norm        of the whole gradient before clipping
    gradient    averaged, before clipping; infinite if one side is None, or if sparse gradients have different rows
    buffer      after the step; integers must be equal
    parameter   after the step
    update      the parameter's change in this step, which reveals what a small learning rate hides in the parameter
    scale       the factor that all gradients have in common, if they do (`common_factor.py`)

An error up to the tolerance of the precision counts as rounding. A gradient beyond it still passes if its
error is at most what rounding does to the reference's gradient, or to another one that rounding moves beyond
its tolerance: the reference is rerun with its parameters perturbed by a few units of rounding
(`reruns.rounding_effect`).

Elements of a buffer or parameter that are infinite or NaN (a mask of -inf) must be equal on both sides and
count in no norm. A gradient that is not finite always fails.

Optimizers that divide by the gradient's size turn rounding into a full step wherever a gradient is pure rounding (a bias before
batch norm, the bias of attention keys), and the effect spreads. So the reference updates with each of the plan's gradients that
passed, and continues from the plan's parameters once those passed, too. Then every element can be compared, and the two runs do
not diverge.

Tensors are compared one by one as they arrive: no copy of a step's gradients or parameters is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import Kind, TensorError
from meshloom.verify.common_factor import CommonFactor
from meshloom.verify.compare_chunks import facts_of, first_module
from meshloom.verify.reference.float64_blocks import distance, float64_blocks, multiple_of, norm, same_rows
from meshloom.verify.reference.step_records import Cast, StepRecord

Gradients = Mapping[str, Tensor | None]
FLOOR = 1e-3
ROUNDING_UNITS = 16

# float64: the goal of verification. In the others correct runs stay well below (tests/test_verify.py), and
# the smallest relevant mistakes are above (a mean of means over 17, 17, 16 and 16 samples is off by about
# 1e-2).
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def rounds_partial_sums(plan: Plan) -> bool:
    """Whether results are sums of parts, each rounded to what operators return, that one device has in one sum: along
    tp, or over replicas whose batch statistics are synchronised. A compiler's fused operators round elsewhere, too."""
    return plan.tp > 1 or plan.compiles or (plan.sync_batch_norm and plan.dp > 1)


def sums_in_other_orders(plan: Plan) -> bool:
    """Whether gradients that one device adds up chunk by chunk are added up in another order; along pp also those of a
    parameter that several stages use, stage by stage."""
    return plan.num_chunks > 2 or (plan.num_chunks > 1 and plan.pp > 1)


def tolerance_of(dtype: torch.dtype | None) -> float:
    """Of what is computed in this precision in other orders or pieces; None: 0."""
    return 0.0 if dtype is None else _TOLERANCES.get(dtype, 0.5)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step of both sides. facts: differences other than numbers, a sentence each. turn: the name of its loss, if it is
    a turn of several. skipped: whether one device skips its update."""

    step: int
    loss: tuple[float, float]  # the plan's, one device's
    errors: Sequence[TensorError]
    facts: Sequence[str]
    # the first in order of execution whose output differs, else the last whose gradient does
    first_module: str | None
    turn: str = ""
    skipped: bool = False

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        return not self.facts and all(error.passed for error in self.errors)

    def failed(self, kind: Kind) -> list[str]:
        """Names of the tensors that fail in this kind of comparison."""
        return [error.name for error in self.errors if error.kind == kind and not error.passed]


@dataclass(kw_only=True)
class Comparer:
    """Compares step after step. precision: of the parameters. autocast: what the plan computes losses under.
    lowered: what the plan rounds parameters to, of which copies in `precision` are updated."""

    plan: Plan
    precision: torch.dtype
    autocast: torch.dtype | None = None
    lowered: torch.dtype | None = None
    _casts: set[Cast] = field(default_factory=set[Cast])

    @property
    def casts(self) -> tuple[Cast, ...]:
        """All reductions of precision in the reference so far, but those of the plan's autocast."""
        own = [
            each
            for each in self._casts
            if each.in_optimizer or getattr(torch, each.dtype) not in (self.autocast, self.lowered)
        ]
        return tuple(sorted(own, key=lambda cast: (cast.in_optimizer, cast.place, cast.dtype)))

    def tolerance(
        self, reference: Sequence[Cast] = (), *, updated: bool = False, gradients: bool = False
    ) -> float:
        """The tolerance of what is computed before (`updated=False`) or after the optimizer of a step
        runs, given that step's casts in the reference. gradients: of these alone.

        Casts by the plan's autocast are of equal values wherever operators run on whole chunks, so they widen nothing
        (decision 40). Where partial sums are rounded, they do for losses and buffers; gradients there are judged by
        how far rounding moves them. So it is with parameters of lower precision (decision 46).
        """
        self._casts |= set(reference)
        partial = rounds_partial_sums(self.plan) and not updated and not gradients
        lower = [
            tolerance_of(dtype)
            for cast in self._casts
            for dtype in [getattr(torch, cast.dtype)]
            if (updated or not cast.in_optimizer)
            and (partial or cast.in_optimizer or dtype not in (self.autocast, self.lowered))
        ]
        if partial and self.lowered:
            lower.append(tolerance_of(self.lowered))
        return max([_TOLERANCES[self.precision], *lower])

    def compare(
        self, ours: StepRecord, reference: StepRecord, tensor_errors: Sequence[TensorError]
    ) -> Comparison:
        """The comparison of the next step. tensor_errors: of its gradients, buffers and parameters."""
        tolerance = self.tolerance(reference.casts)
        errors = [*_loss_errors(ours, reference, tolerance), *tensor_errors]
        facts = [*facts_of(ours, reference, self.plan)]
        module: str | None = None
        if facts or not all(error.passed for error in errors):
            module = first_module(ours, reference, errors, tolerance, self.plan)
        losses = ours.loss, reference.loss
        return Comparison(
            step=reference.step,
            loss=losses,
            errors=errors,
            facts=facts,
            first_module=module,
            turn=reference.turn,
            skipped=reference.skipped,
        )


def _loss_errors(ours: StepRecord, reference: StepRecord, tolerance: float) -> Iterator[TensorError]:
    size = abs(reference.loss)
    if reference.weight:
        size = max(size, sum(abs(chunk.loss_sum) for chunk in reference.chunks) / reference.weight)
    error = _ratio(abs(ours.loss - reference.loss), size)
    if reference.skipped and not math.isfinite(reference.loss):
        error = math.inf if math.isfinite(ours.loss) else 0.0
    yield TensorError(name="loss", kind="loss", step=reference.step, error=error, tolerance=tolerance)
    if ours.gradient_norm is not None and reference.gradient_norm is not None:
        error = _ratio(abs(ours.gradient_norm - reference.gradient_norm), reference.gradient_norm)
        yield TensorError(
            name="gradient norm", kind="norm", step=reference.step, error=error, tolerance=tolerance
        )


class GradientErrors:
    """The errors of one step's averaged gradients, which arrive one by one.

    reference: its gradients by name; one may be changed after it was compared. measure_rounding: called at most once, when an
    error exceeds the tolerance; by name how far they move when parameters are perturbed by rounding. partial: what the plan rounds
    partial sums to; None: to nothing less than their precision. precision: that of which some units are rounding; None: theirs.
    travels: how far rounding on the way between replicas moves gradients that do not cancel there, relative to their size;
    measure_travels: called at most once; by name how far it moves those that do. roundings: half units of `partial` that a gradient
    may be off by. factor: finds what all have in common, where nothing is rounded to a lower precision.
    """

    def __init__(
        self, reference: Gradients, step: int, tolerance: float, measure_rounding: Callable[[], Mapping[str, float]] | None = None,
        partial: torch.dtype | None = None, precision: torch.dtype | None = None, travels: float = 0.0,
        measure_travels: Callable[[], Mapping[str, float]] | None = None, roundings: float = 1.0,
        factor: CommonFactor | None = None,
    ) -> None:  # fmt: skip
        self._factor = factor
        self._travels, self._measure_travels = travels, measure_travels
        self._of_travels: Mapping[str, float] | None = None
        self._half_unit = 0.0 if partial is None else roundings * torch.finfo(partial).eps / 2
        self._precision = precision
        self.norms = {name: norm(each) for name, each in reference.items() if each is not None}
        self._measure_rounding = measure_rounding
        self._effects: Mapping[str, float] | None = None
        self._largest_effect = 0.0
        self._reference = reference
        self._step = step
        self._tolerance = tolerance
        self._largest = max(self.norms.values(), default=0.0)
        self._compared: dict[str, TensorError] = {}

    def compare(self, name: str, ours: Tensor | None) -> TensorError:
        """The error of the plan's next gradient."""
        error = self._error(name, ours, self._reference.get(name), self._size(name))
        tolerance = self._allowed(name)
        if error > tolerance and self._travels:
            tolerance = max(tolerance, self._travel_effect(name))
        effect = 0.0 if error <= tolerance or not math.isfinite(error) else self._rounding_effect(name)
        compared = self._tensor_error(name, error, max(tolerance, effect), moved=effect > tolerance)
        self._compared[name] = compared
        if (
            self._factor
            and compared.passed
            and ours is not None
            and self.norms.get(name, 0.0) > FLOOR * self._largest
        ):
            self._factor.add(ours, self._reference[name])
        return compared

    def errors(self) -> list[TensorError]:
        """The errors of all gradients; infinite for those that did not arrive. If all pass, the factor that they have in common."""
        found = [
            self._compared.get(name) or self._tensor_error(name, math.inf, self._tolerance)
            for name in dict.fromkeys([*self._reference, *self._compared])
        ]
        if self._factor and all(error.passed for error in found):
            found += self._factor.errors(self._step)
        return found

    def _error(self, name: str, ours: Tensor | None, reference: Tensor | None, size: float) -> float:
        if name not in self._reference:
            return math.inf
        if ours is None or reference is None:
            return 0.0 if ours is reference else math.inf
        if ours.is_sparse and reference.is_sparse:
            ours, reference = ours.coalesce(), reference.coalesce()
            if not same_rows(ours, reference):
                return math.inf  # SparseAdam updates the rows that were used
            ours, reference = ours.values(), reference.values()
        if not all(bool(block.isfinite().all()) for block in float64_blocks(reference.to_dense())):
            return math.inf
        return _error(ours.to_dense(), reference.to_dense(), size)

    def _size(self, name: str) -> float:
        return max(self.norms.get(name, 0.0), FLOOR * self._largest)

    def _allowed(self, name: str) -> float:
        # A gradient that is small because large terms cancel has their rounding error: some units of the
        # largest gradient, or half of one to which partial sums are rounded.
        reference, size = self._reference.get(name), self._size(name)
        if reference is None or not size:
            return self._tolerance
        rounding = max(ROUNDING_UNITS * torch.finfo(self._precision or reference.dtype).eps, self._half_unit)
        return self._tolerance + rounding * self._largest / size + self._travels

    def _travel_effect(self, name: str) -> float:
        if self._of_travels is None:
            self._of_travels = self._measure_travels() if self._measure_travels else {}
        return _ratio(self._of_travels.get(name, 0.0), self._size(name))

    def _rounding_effect(self, name: str) -> float:
        """The effect of rounding on this gradient, or the largest effect beyond a gradient's tolerance:
        where a ReLU flips in the rerun, it might have flipped here in the plan."""
        if self._effects is None:
            effects = self._measure_rounding() if self._measure_rounding else {}
            self._effects = {each: _ratio(effect, self._size(each)) for each, effect in effects.items()}
            self._largest_effect = max(
                (effect for each, effect in self._effects.items() if self._allowed(each) < effect < math.inf),
                default=0.0,
            )
        return max(self._effects.get(name, 0.0), self._largest_effect)

    def _tensor_error(self, name: str, error: float, tolerance: float, *, moved: bool = False) -> TensorError:
        reference = self._reference.get(name)
        elements = 0 if reference is None else reference.numel()
        return TensorError(
            name=name, kind="gradient", step=self._step, error=error, tolerance=tolerance, elements=elements, moved=moved
        )  # fmt: skip


class StateErrors:
    """The errors of one step's parameters, their updates, and buffers, which arrive one by one.

    parameters, buffers: the reference's after the step, by name. before: its parameters before the update,
    which equal the plan's. tolerance: of buffers. updated: tolerance of what the optimizer computed. merged: what the plan
    rounds buffers to, where they are merged from what several chunks have written; None: to nothing.
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
        merged: torch.dtype | None = None,
    ) -> None:
        self._merged = merged
        self._parameters, self._before = parameters, before
        self._buffers = buffers
        self._step = step
        self._tolerance, self._updated = tolerance, updated
        self._norms = {name: norm(each) for name, each in parameters.items()}
        self._updates = {name: _norm_of_difference(each, before[name]) for name, each in parameters.items()}
        self._largest = max(self._norms.values(), default=0.0)
        self._largest_update = max(self._updates.values(), default=0.0)
        self._largest_buffer = max(
            (norm(each) for each in buffers.values() if _is_inexact(each)), default=0.0
        )
        self._compared: dict[str, list[TensorError]] = {}

    def compare(self, name: str, ours: Tensor) -> list[TensorError]:
        """The errors of the plan's next parameter or buffer."""
        if name in self._parameters:
            self._compared[name] = self._parameter_errors(name, ours)
        elif name in self._buffers:
            error = self._buffer_error(name, ours)
            self._compared[name] = [self._tensor_error(name, "buffer", error, self._allowed(name))]
        return self._compared.get(name, [])

    def errors(self) -> list[TensorError]:
        """The errors of all tensors of the reference; infinite for those that did not arrive."""
        found: list[TensorError] = []
        for name in self._buffers:
            lost = self._tensor_error(name, "buffer", math.inf, self._tolerance)
            found += self._compared.get(name) or [lost]
        for name in self._parameters:
            lost = self._tensor_error(name, "parameter", math.inf, self._updated)
            found += self._compared.get(name) or [lost]
        return found

    def _parameter_errors(self, name: str, ours: Tensor) -> list[TensorError]:
        reference = self._parameters[name]
        error = _error(ours, reference, max(self._norms[name], FLOOR * self._largest))
        if ours.shape != reference.shape:
            return [self._tensor_error(name, "parameter", error, self._updated)]
        # The difference of two parameters has the rounding of both: half a unit each, on either side.
        size = max(self._updates[name], FLOOR * self._largest_update)
        rounding = (
            2 * torch.finfo(reference.dtype).eps * self._norms[name] / size
            if size and reference.is_floating_point()
            else 0.0
        )
        update = self._tensor_error(name, "update", _error(ours, reference, size), self._updated + rounding)
        if not update.passed:
            update = replace(update, multiple=multiple_of(ours, reference, self._before[name]))
        return [self._tensor_error(name, "parameter", error, self._updated), update]

    def _allowed(self, name: str) -> float:
        rounded = self._merged if self._buffers[name].dtype == self._merged else None
        return max(self._tolerance, tolerance_of(rounded))

    def _buffer_error(self, name: str, ours: Tensor) -> float:
        reference = self._buffers[name]
        if _is_inexact(reference):
            return _error(ours, reference, max(norm(reference), FLOOR * self._largest_buffer))
        return 0.0 if torch.equal(ours.to(reference.device), reference) else math.inf

    def _tensor_error(self, name: str, kind: Kind, error: float, tolerance: float) -> TensorError:
        elements = (self._buffers if kind == "buffer" else self._parameters)[name].numel()
        return TensorError(
            name=name, kind=kind, step=self._step, error=error, tolerance=tolerance, elements=elements
        )


def _error(ours: Tensor, reference: Tensor, size: float) -> float:
    return _ratio(distance(ours, reference), size) if ours.shape == reference.shape else math.inf


def _norm_of_difference(after: Tensor, before: Tensor) -> float:
    """||after - before|| over the finite elements."""
    blocks = zip(float64_blocks(after), float64_blocks(before), strict=True)
    return math.sqrt(sum(float(torch.nan_to_num(a - b, 0.0, 0.0, 0.0).square().sum()) for a, b in blocks))


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) and math.isfinite(size) else math.inf


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

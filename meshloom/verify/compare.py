"""How far a plan's step is from one device's, tensor by tensor, and what counts as rounding.

The error of a tensor is ||a - b|| / max(||b||, 1e-3 * largest norm of its kind in this step): what is small beside the rest
is measured by the rest. a is the plan's, b is one device's.

    loss        |a - b| / mean size of a chunk's loss
    norm        of the whole gradient before clipping
    gradient    averaged, before clipping; None on one side only is an infinite error, and so are other rows of a sparse one
    buffer      after the step; integers must be equal
    parameter   after the step
    update      the parameter's change in this step, which shows what a small learning rate hides in the parameter

Elements of a buffer or parameter that are infinite or NaN (a mask of -inf) must be the same on both sides and count in no norm. A gradient
that is not finite never agrees.

An optimizer that divides by the gradient's size turns rounding into a full step wherever a gradient is nothing but rounding
(a bias before batch norm, the bias of attention keys), and what comes of it spreads: into running means, and through
optimizers that look at a whole tensor into its other elements. So once the gradients of a step agree, one device is given the
plan's to update with (`Reference.update`): then every element can be compared, and neither run drifts from the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshloom.plan import Plan
from meshloom.verify.records import Cast, ChunkRecord, ModuleOutput, StepRecord

Kind = Literal["loss", "norm", "gradient", "buffer", "parameter", "update"]
Gradients = Mapping[str, Tensor | None]
FLOOR = 1e-3
ROUNDING_UNITS = 16

# float64: what is asked of verification. The others: correct runs stay well below (see tests/test_verify.py), the smallest
# mistakes worth the name lie above (a mean of means over 17, 17, 16 and 16 samples is off by some 1e-2).
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """One comparison of a tensor of so many elements."""

    name: str
    kind: Kind
    step: int
    error: float
    tolerance: float
    elements: int = 1

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
    first_module: str | None  # first in order of execution whose output differs; else the last whose gradient does

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.facts and all(error.passed for error in self.errors)

    def failed(self, kind: Kind) -> list[str]:
        """Names whose error of this kind is more than rounding."""
        return [error.name for error in self.errors if error.kind == kind and not error.passed]


@dataclass(kw_only=True)
class Comparer:
    """Compares one step after another. `initial`: parameters before the first; `precision`: of the parameters."""

    plan: Plan
    precision: torch.dtype
    initial: Mapping[str, Tensor]
    _before: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None
    _casts: set[Cast] = field(default_factory=set[Cast])
    _drifted: bool = False  # whether an optimizer's casts have made the runs differ by more than rounding

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Reductions of precision that widened a tolerance, on one device so far."""
        return tuple(sorted(self._casts, key=lambda cast: (cast.in_optimizer, cast.place, cast.dtype)))

    def tolerance(self, one: Sequence[Cast] = (), *, updated: bool = False) -> float:
        """Of what is computed before (`updated=False`) or after the optimizer of a step runs, given the casts of that step on one device."""
        self._casts |= set(one)
        low = [_TOLERANCES.get(getattr(torch, cast.dtype), 0.5) for cast in self._casts if updated or self._drifted or not cast.in_optimizer]
        return max([_TOLERANCES[self.precision], *low])

    def agree(self, ours: Gradients, one: Gradients, casts: Sequence[Cast] = ()) -> bool:
        """Whether the averaged gradients of the next step agree, so that one side's may stand for the other's; `casts` on the way to them."""
        return all(error.passed for error in _gradient_errors(ours, one, 0, self.tolerance(casts)))

    def compare(self, ours: StepRecord, one: StepRecord) -> Comparison:
        """Compare the next step."""
        before, after = self.tolerance(one.casts), self.tolerance(updated=True)
        errors = [
            *_loss_errors(ours, one, before),
            *_gradient_errors(ours.gradients, one.gradients, one.step, before),
            *_buffer_errors(ours, one, before),
            *self._parameter_errors(ours, one, after),
        ]
        self._before = ours.parameters, one.parameters
        self._drifted |= any(error.error > _TOLERANCES[self.precision] for error in errors if error.kind == "update")
        facts = [*_facts(ours, one, self.plan)]
        module = None if not facts and all(error.passed for error in errors) else _first_module(ours, one, errors, before, self.plan)
        return Comparison(step=one.step, loss=(ours.loss, one.loss), errors=errors, facts=facts, first_module=module)

    def _parameter_errors(self, ours: StepRecord, one: StepRecord, tolerance: float) -> Iterator[TensorError]:
        before, one_before = self._before or (self.initial, self.initial)
        updates = {name: _wide(one.parameters[name]) - _wide(one_before[name]) for name in one.parameters}
        largest, largest_update = _largest(one.parameters), _largest(updates)
        for name, b in one.parameters.items():
            a = ours.parameters.get(name)
            if a is None or a.shape != b.shape:
                yield TensorError(name=name, kind="parameter", step=one.step, error=math.inf, tolerance=tolerance, elements=b.numel())
                continue
            error = _error(a, b, FLOOR * largest)
            yield TensorError(name=name, kind="parameter", step=one.step, error=error, tolerance=tolerance, elements=b.numel())
            # Subtracting two parameters shows the rounding of both: half a unit each, for the plan and for one device.
            size = max(_norm(updates[name]), FLOOR * largest_update)
            rounding = 2 * torch.finfo(b.dtype).eps * _norm(b) / size if size and b.is_floating_point() else 0.0
            error = _error(_wide(a) - _wide(before[name]), updates[name], FLOOR * largest_update)
            yield TensorError(name=name, kind="update", step=one.step, error=error, tolerance=tolerance + rounding, elements=b.numel())


def _loss_errors(ours: StepRecord, one: StepRecord, tolerance: float) -> Iterator[TensorError]:
    size = max(abs(one.loss), sum(abs(chunk.loss_sum) for chunk in one.chunks) / one.weight if one.weight else 0.0)
    yield TensorError(name="loss", kind="loss", step=one.step, error=_ratio(abs(ours.loss - one.loss), size), tolerance=tolerance)
    if ours.gradient_norm is not None and one.gradient_norm is not None:
        error = _ratio(abs(ours.gradient_norm - one.gradient_norm), one.gradient_norm)
        yield TensorError(name="gradient norm", kind="norm", step=one.step, error=error, tolerance=tolerance)


def _gradient_errors(ours: Gradients, one: Gradients, step: int, tolerance: float) -> Iterator[TensorError]:
    largest = _largest(one)
    for name in dict.fromkeys([*one, *ours]):
        error = gradient_error(ours, one, name, largest) if name in one and name in ours else math.inf
        b = one.get(name)
        # A gradient that is small because large terms cancel carries their rounding: some units of the largest gradient.
        size = max(_norm(b), FLOOR * largest) if b is not None else 0.0
        rounding = ROUNDING_UNITS * torch.finfo(b.dtype).eps * largest / size if b is not None and size else 0.0
        yield TensorError(name=name, kind="gradient", step=step, error=error, tolerance=tolerance + rounding, elements=0 if b is None else b.numel())


def gradient_error(ours: Gradients, one: Gradients, name: str, largest: float | None = None) -> float:
    """Error of one gradient; infinite if one side alone is None. `largest`: largest norm in `one`, if known already."""
    a, b = ours.get(name), one.get(name)
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a.is_sparse and b.is_sparse and not _same_rows(a, b):
        return math.inf
    a, b = a.to_dense(), b.to_dense()
    if not bool(b.isfinite().all()):
        return math.inf
    return _error(a, b, FLOOR * (_largest(one) if largest is None else largest))


def _same_rows(a: Tensor, b: Tensor) -> bool:
    """Whether sparse gradients say of the same rows that they were used: those are what SparseAdam updates."""
    return a.shape == b.shape and torch.equal(a.coalesce().indices(), b.coalesce().indices())


def _buffer_errors(ours: StepRecord, one: StepRecord, tolerance: float) -> Iterator[TensorError]:
    largest = _largest({name: buffer for name, buffer in one.buffers.items() if _has_fractions(buffer)})
    for name, b in one.buffers.items():
        a = ours.buffers.get(name)
        if a is None:
            error = math.inf
        elif _has_fractions(b):
            error = _error(a, b, FLOOR * largest)
        else:
            error = 0.0 if torch.equal(a, b) else math.inf
        yield TensorError(name=name, kind="buffer", step=one.step, error=error, tolerance=tolerance, elements=b.numel())


def _error(a: Tensor, b: Tensor, floor: float) -> float:
    if a.shape != b.shape:
        return math.inf
    a, b = _wide(a), _wide(b)
    odd = ~(a.isfinite() & b.isfinite())
    if not bool(((a == b) | (a.isnan() & b.isnan()))[odd].all()):
        return math.inf
    return _ratio(float((a - b).masked_fill(odd, 0.0).norm()), max(_norm(b), floor))


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) and math.isfinite(size) else math.inf


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """In float64; of complex numbers real and imaginary part, as each may be infinite by itself."""
    dense = tensor.to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()


def _norm(tensor: Tensor) -> float:
    """Of what is finite."""
    return float(torch.nan_to_num(_wide(tensor), 0.0, 0.0, 0.0).norm())


def _largest(tensors: Mapping[str, Tensor | None]) -> float:
    return max((_norm(tensor) for tensor in tensors.values() if tensor is not None), default=0.0)


def _facts(ours: StepRecord, one: StepRecord, plan: Plan) -> Iterator[str]:
    """What is wrong although every tensor may agree."""
    if len(set(ours.replicas)) > 1:
        odd = next(replica for replica, digest in enumerate(ours.replicas) if digest != ours.replicas[0])
        yield f"Replicas 0 and {odd} hold different parameters or buffers after step {ours.step}."
    if len(ours.chunks) == len(one.chunks) or not plan.sync_batch_norm:
        yield from _data_facts(ours, one)
    yield from _draw_facts(one)


def _data_facts(ours: StepRecord, one: StepRecord) -> Iterator[str]:
    here, there = filled(ours.chunks), filled(one.chunks)
    for index in sorted({*here, *there}):
        a, b = here.get(index), there.get(index)
        if a is None or b is None or a.samples != b.samples:
            yield f"Chunk {index} has {a.samples if a else 0} samples, and {b.samples if b else 0} on one device."
        elif a.data != b.data:
            yield f"Chunk {index} has other data than on one device."


def _draw_facts(one: StepRecord) -> Iterator[str]:
    """Chunks of one device that draw from one seed: a mistake both sides share, which no difference would show."""
    seeds: dict[int, ChunkRecord] = {}
    for chunk in one.chunks:
        if chunk.draws and (other := seeds.setdefault(chunk.seed, chunk)) is not chunk:
            yield f"Chunks {other.index} and {chunk.index} draw the same random numbers, on one device too."


def filled(chunks: Sequence[ChunkRecord]) -> dict[int, ChunkRecord]:
    """Chunks with samples, by index."""
    return {chunk.index: chunk for chunk in chunks if chunk.samples}


def _first_module(ours: StepRecord, one: StepRecord, errors: Sequence[TensorError], tolerance: float, plan: Plan) -> str | None:
    outputs = list(zip(_outputs(ours, plan), _outputs(one, plan), strict=False))
    for here, there in outputs:
        if output_differs(here, there, tolerance):
            return there.name or "the whole model"
    # Every output agrees, so the gradient went wrong: backward runs from the last module to the first.
    wrong = {error.name for error in errors if error.kind == "gradient" and not error.passed}
    modules = [there.name for _, there in reversed(outputs)]
    owners = {name.rpartition(".")[0] for name in wrong}
    return next((module or "the whole model" for module in modules if module in owners), next(iter(sorted(owners)), None) or None)


def _outputs(record: StepRecord, plan: Plan) -> list[ModuleOutput]:
    """In order of execution; of chunks that are one forward on one device, the sums over the chunks."""
    chunks = [chunk for chunk in sorted(record.chunks, key=lambda chunk: chunk.index) if chunk.modules]
    if not plan.sync_batch_norm:
        return [output for chunk in chunks for output in chunk.modules]
    total: list[ModuleOutput] = []
    for j in range(plan.microbatches):
        sums: dict[tuple[str, int], ModuleOutput] = {}
        for chunk in chunks:
            for output in chunk.modules if chunk.index % plan.microbatches == j else ():
                key = output.name, output.call
                sums[key] = add_outputs(sums[key], output) if key in sums else output
        total += sums.values()
    return total


def add_outputs(a: ModuleOutput, b: ModuleOutput) -> ModuleOutput:
    """The output of one module on the rows of both."""
    return ModuleOutput(name=a.name, call=a.call, total=a.total + b.total, square=a.square + b.square, count=a.count + b.count)


def output_differs(a: ModuleOutput, b: ModuleOutput, tolerance: float) -> bool:
    """Whether two outputs differ by more than rounding, as far as their sums tell."""
    if (a.name, a.call, a.count) != (b.name, b.call, b.count):
        return True
    if not (math.isfinite(a.square) and math.isfinite(b.square)):  # a mask of -inf, or a mistake
        return (str(a.total), str(a.square)) != (str(b.total), str(b.square))
    size = math.sqrt(b.square)
    norm, total = abs(math.sqrt(a.square) - size), abs(a.total - b.total) / math.sqrt(max(b.count, 1))
    return not (max(norm, total) <= tolerance * size)  # NaN differs

"""How far a plan's parameters, their updates and its buffers are from one device's after a step, and which differences count
as rounding. The error of a tensor is ||a - b|| / ||b||, each relative to its own norm.

    parameter, update   what the optimizer computes of equal gradients and values, and the rounding of two parameters, of which
                        an update is the difference
    buffer              128 units in the last place; where the step has changed it, 8 times what rounding does to it, up to the most
                        that is put down to rounding, unless the buffer is nothing else. One that the step leaves as it is must stay so

Elements that are infinite or NaN (a mask of -inf) must be equal on both sides and count in no norm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from meshloom.optimizer.reach import ELEMENTWISE
from meshloom.verify.between_steps.checks import Kind, TensorError
from meshloom.verify.reference.float64_blocks import distance, float64_blocks, norm, relative
from meshloom.verify.reference.step_records import Cast
from meshloom.verify.tolerances.gradient_errors import FLOOR, TIMES
from meshloom.verify.tolerances.of_precision import most_tolerated, unmeasured_through

_ALONE = 0.1  # of a buffer's norm: what rounding moves more is rounding alone


def update_tolerances(
    optimizers: Sequence[Optimizer], casts: Sequence[Cast], names: Mapping[int, str], precision: torch.dtype
) -> dict[str, float]:
    """By name of a parameter that an optimizer updates in this step, the error of what it computes of equal gradients. names: by identity.

    An optimizer that computes each element by itself computes the same of a slice; one that adds up over a parameter does so in another order; and
    what one rounds to a lower precision concerns its own parameters."""
    found: dict[str, float] = {}
    for optimizer in optimizers:
        kind = type(optimizer)
        own = [cast.dtype for cast in casts if cast.in_optimizer and cast.place == kind.__name__]
        is_sliced = kind in ELEMENTWISE and kind is not SparseAdam
        least = unmeasured_through(precision) if is_sliced else most_tolerated(precision)
        allowed = max([least, *(most_tolerated(getattr(torch, each)) for each in own)])
        for group in optimizer.param_groups:
            found |= {names[id(each)]: allowed for each in group["params"] if id(each) in names}
    return found


class StateErrors:
    """The errors of one step's parameters, their updates, and buffers, which arrive one by one.

    parameters, buffers: the reference's after the step, by name. before: its parameters before the update,
    which equal the plan's. changed: the buffers that the step has changed, with how far rounding moves each, relative to its size; 0: that was
    not measured, as no gradient needed it. updates: of `update_tolerances`. merged: what the plan rounds buffers to, where they are merged from
    what several chunks have written; None: to nothing. partial: what it rounds partial sums to, of which some buffers may be statistics; None: to
    nothing.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], before: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *,
        changed: Mapping[str, float], step: int, updates: Mapping[str, float], merged: torch.dtype | None = None, partial: torch.dtype | None = None
    ) -> None:  # fmt: skip
        self._parameters, self._before, self._buffers, self._step = parameters, before, buffers, step
        self._updates, self._merged, self._partial = updates, merged, partial
        self._changed, self._sizes = changed, buffer_sizes(buffers, changed)
        self._compared: dict[str, list[TensorError]] = {}

    def compare(self, name: str, ours: Tensor) -> list[TensorError]:
        """The errors of the plan's next parameter or buffer."""
        if name in self._parameters:
            self._compared[name] = self._parameter_errors(name, ours)
        elif name in self._buffers:
            self._compared[name] = [self._buffer_error(name, ours)]
        return self._compared.get(name, [])

    def errors(self) -> list[TensorError]:
        """The errors of all tensors of the reference; infinite for those that did not arrive."""
        found: list[TensorError] = []
        for name in self._buffers:
            found += self._compared.get(name) or [self._tensor_error(name, "buffer", math.inf, 0.0)]
        for name in self._parameters:
            found += self._compared.get(name) or [self._tensor_error(name, "parameter", math.inf, 0.0)]
        return found

    def _parameter_errors(self, name: str, ours: Tensor) -> list[TensorError]:
        reference, allowed = self._parameters[name], self._updates.get(name, 0.0)
        size, units = norm(reference), 0.0
        if ours.shape != reference.shape:
            return [self._tensor_error(name, "parameter", math.inf, allowed)]
        if _is_inexact(reference):
            allowed = max(allowed, unmeasured_through(reference.dtype.to_real()))
            # The difference of two parameters has the rounding of both: half a unit each, on either side.
            units = 2 * torch.finfo(reference.dtype).eps * size
        off, moved = distance(ours, reference), _norm_of_difference(reference, self._before[name])
        of_value, of_update = size or moved or 1.0, moved or size or 1.0
        if moved and name not in self._updates:
            # the loss writes it, as buffers are: several chunks' writes are put together in another order
            units = allowed * size
        most = allowed * moved + units
        return [
            self._tensor_error(
                name, "parameter", relative(off, of_value), (allowed * size + most) / of_value
            ),
            self._tensor_error(name, "update", relative(off, of_update), most / of_update),
        ]

    def _buffer_error(self, name: str, ours: Tensor) -> TensorError:
        reference = self._buffers[name]
        if not _is_inexact(reference):
            off = 0.0 if torch.equal(ours.to(reference.device), reference) else math.inf
            return self._tensor_error(name, "buffer", off, 0.0)
        size = self._sizes[name]
        off = distance(ours, reference) if ours.shape == reference.shape else math.inf
        precision = reference.dtype.to_real()
        allowed = unmeasured_through(precision)
        if name in self._changed:
            effect = self._changed[name]
            is_alone = effect * size > _ALONE * norm(reference)
            most = math.inf if is_alone else max(map(most_tolerated, (precision, self._partial)))
            allowed = max(allowed, min(TIMES * effect, most), effect)
        if precision == self._merged:
            allowed = max(allowed, most_tolerated(precision))
        return self._tensor_error(name, "buffer", relative(off, size), allowed)

    def _tensor_error(self, name: str, kind: Kind, error: float, tolerance: float) -> TensorError:
        return TensorError(name=name, kind=kind, step=self._step, error=error, tolerance=tolerance)


def buffer_sizes(buffers: Mapping[str, Tensor], changed: Collection[str]) -> dict[str, float]:
    """What the errors of floating-point buffers are relative to: the norm of each; of those that the step has changed, at least a
    thousandth of that of the largest such buffer of the same module, so that a mean of 0 is measured by its variance."""
    norms = {name: norm(each) for name, each in buffers.items() if _is_inexact(each)}
    largest: dict[str, float] = {}
    for name in norms:
        if name in changed:
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, 0.0), norms[name])
    return {
        name: max(size, FLOOR * largest[name.rpartition(".")[0]]) if name in changed else size
        for name, size in norms.items()
    }


def _norm_of_difference(after: Tensor, before: Tensor) -> float:
    """||after - before|| over the finite elements."""
    blocks = zip(float64_blocks(after), float64_blocks(before), strict=True)
    return math.sqrt(sum(float(torch.nan_to_num(a - b, 0.0, 0.0, 0.0).square().sum()) for a, b in blocks))


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

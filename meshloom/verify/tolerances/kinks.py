"""One device's gradients with units on the other side of a kink, where a plan may have them.

An input of a ReLU that is zero up to rounding may be positive on one device and negative under a plan. Both are right, and their gradients
differ by all that the unit passes on. A perturbed rerun seldom turns over the same units. So inputs that are within rounding of a kink are
looked for on one device, and each is turned over by itself; those that together explain the plan's gradient, if any do, are turned over
together in one more rerun, whose gradients are compared like any others: nothing is tolerated that this rerun does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshloom.verify.reference.reference import Gradients, Reference

_NEAR = 32  # units in the last place of what inputs of a function are in the mean: within that of a kink
_MOST = 16  # units that are tried, the nearest
_LEAST = 0.1  # of what is left, that turning over one more unit must explain
_ELEMENTS = 4096  # of a gradient, that are looked at to find units: those that are farthest off
_SEARCHES = 2  # in a step
_AT = {
    **dict.fromkeys(
        ("relu", "relu_", "leaky_relu", "leaky_relu_", "prelu", "abs", "abs_", "selu", "elu", "celu"), (0.0,)
    ),
    "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0), "hardsigmoid": (-3.0, 3.0),
}  # fmt: skip
_BETWEEN = {  # names of the function's limits, and what they are if they are not given
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "hardtanh_": (("min_val", -1.0), ("max_val", 1.0)),
    "clamp": (("min", None), ("max", None)),
    "clamp_": (("min", None), ("max", None)),
    "clamp_min": (("min", None),),
    "clamp_max": (("max", None),),
    "_threshold": (("threshold", None),),  # torch.nn.functional.threshold
    "threshold": (("threshold", None),),
}


@dataclass(frozen=True, kw_only=True)
class NearUnit:
    """One input of a function. call: number of the function's call among those with kinks in this forward of the step.
    element: of the flattened input. off: how far from the kink, relative to what inputs of the call are in the mean."""

    forward: int
    call: int
    element: int
    kink: float
    off: float


class AtKinks:
    """Of one step, between its gradients and its update. turned: how many units explained one."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._with_turned: Gradients = {}
        self._searches = 0
        self.turned = 0  # units

    def gradient(self, name: str, ours: Tensor) -> Tensor | None:
        """One device's averaged gradient of the parameter with those units on their other side that explain the plan's, `ours`, or explained
        another one's before; None: there are none."""
        if not self._with_turned and self._searches < _SEARCHES:
            self._searches += 1
            if explaining := self._explaining(name, ours):
                self.turned, self._with_turned = len(explaining), self._gradients_with(explaining)
        return self._with_turned.get(name)

    def _explaining(self, name: str, ours: Tensor) -> list[NearUnit]:
        right = self._reference.gradients.get(name)
        if right is None or right.is_complex() or right.shape != ours.shape:
            return []
        if {right.layout, ours.layout} != {torch.strided}:
            return []
        off = (ours.detach().to(right) - right).reshape(-1)
        where = off.abs().topk(min(_ELEMENTS, off.numel())).indices
        left = off[where].double()
        columns = self._columns(name, where)
        chosen: list[NearUnit] = []
        while columns:
            best = min(columns, key=lambda unit: float((left - columns[unit]).norm()))
            rest = left - columns.pop(best)
            if not float(rest.norm()) < (1 - _LEAST) * float(left.norm()):
                break
            left = rest
            chosen.append(best)
        return chosen

    def _columns(self, name: str, where: Tensor) -> dict[NearUnit, Tensor]:
        """How the averaged gradient of this name changes with each unit near a kink, in these of its elements."""
        reference = self._reference
        forwards = [*reference.forwards()]

        def gradient(kinks: _Kinks) -> Tensor:
            reference.restore()
            reference.model.zero_grad(set_to_none=True)
            with kinks:
                reference.run_forward(forwards[kinks.forward], watched=False)
            reference.divide(self._weight)
            found = reference.gradients[name]  # None: this chunk does not use the parameter
            return (
                where.new_zeros(where.shape, dtype=torch.float64)
                if found is None
                else found.reshape(-1)[where].double()
            )

        with reference.rerun():
            looked = [_Kinks(number) for number in range(len(forwards))]
            plain = [gradient(kinks) for kinks in looked]
            near = sorted((unit for kinks in looked for unit in kinks.near), key=lambda unit: unit.off)
            return {
                unit: gradient(_Kinks(unit.forward, [unit])) - plain[unit.forward] for unit in near[:_MOST]
            }

    def _gradients_with(self, turned: Sequence[NearUnit]) -> Gradients:
        """All averaged gradients with these units on their other side."""
        reference = self._reference
        with reference.rerun():
            for number, forward in enumerate(reference.forwards()):
                reference.restore()
                with _Kinks(number, [unit for unit in turned if unit.forward == number]):
                    reference.run_forward(forward, watched=False)
            reference.divide(self._weight)
            return reference.gradients

    @property
    def _weight(self) -> float:
        return sum(chunk.weight for chunk in self._reference.chunks)


class _Kinks(TorchFunctionMode):
    """Turns over units of one forward of the step, or finds those that are near a kink if there are none to turn. near: found so far."""

    def __init__(self, forward: int, turned: Sequence[NearUnit] = ()) -> None:
        super().__init__()
        self.forward, self._turned, self._calls = forward, turned, 0
        self.near: list[NearUnit] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        kinks = _kinks_of(func, args, kwargs)
        if not kinks:
            return func(*args, **kwargs)
        call, self._calls = self._calls, self._calls + 1
        if units := [unit for unit in self._turned if unit.call == call]:
            moved = _moves(args[0], units)
            in_place = func.__name__.endswith("_") or bool(kwargs.get("inplace"))
            args = [args[0].add_(moved) if in_place else args[0] + moved, *args[1:]]
        elif not self._turned:
            self.near += _near(args[0].detach(), kinks, self.forward, call)
        return func(*args, **kwargs)


def _kinks_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[float]:
    """Where the function has a kink; none, if its input is not one in which rounding can turn something over."""
    name = getattr(func, "__name__", "")
    if name not in _AT and name not in _BETWEEN:
        return ()
    if not args or not isinstance(args[0], Tensor) or args[0].dtype not in (torch.float32, torch.float64):
        return ()
    if name in _AT:
        return _AT[name]
    given = (
        kwargs.get(key, args[at] if at < len(args) else default)
        for at, (key, default) in enumerate(_BETWEEN[name], 1)
    )
    return [float(each) for each in given if isinstance(each, int | float) and math.isfinite(each)]


def _near(values: Tensor, kinks: Sequence[float], forward: int, call: int) -> Iterator[NearUnit]:
    size = float(values.square().mean().sqrt()) if values.numel() else 0.0
    if not size or not math.isfinite(size):
        return
    flat = values.reshape(-1)
    for kink in kinks:
        off = (flat - kink).abs() / size
        # what is exactly there is a mask, or padding
        where = ((off <= _NEAR * torch.finfo(values.dtype).eps) & (off > 0)).nonzero().reshape(-1)
        nearest = where[off[where].argsort()[:_MOST]]
        for element, each in zip(nearest.tolist(), off[nearest].tolist(), strict=True):
            yield NearUnit(forward=forward, call=call, element=element, kink=kink, off=each)


def _moves(values: Tensor, units: Sequence[NearUnit]) -> Tensor:
    """What to add so that these units are as far on the other side of their kinks."""
    flat = values.detach().reshape(-1)
    moved = torch.zeros_like(flat)
    for unit in units:
        moved[unit.element] = 2 * (unit.kink - flat[unit.element])
    return moved.view(values.shape)

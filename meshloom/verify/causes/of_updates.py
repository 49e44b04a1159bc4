"""Causes of wrong updates from equal gradients: one device's optimizer takes the step once more in a way that would be wrong, from what it
had before the step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.device.optimizer_copies import copies_of
from meshloom.core.random import preserved_draws
from meshloom.verify.between_steps.checks import DifferingTensor
from meshloom.verify.reference.mistakes import Cause, CauseKind
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.reference.trained_losses import densify_gradients, needs_closure

_SMALL = 2**22  # parameters of a model of which what an update is made from is kept
_LEFT = 0.03  # of the difference, that a cause may leave unexplained
_MANY = 16  # elements, from which a share can be told
_MOST = 0.9  # of them
_OF_ROW = 1e-3  # of what elements of a row are, that their multiples may be apart
_ALIKE = 1e-3  # of the largest change, up to which two are one


@dataclass(frozen=True, kw_only=True)
class _Way:
    """What is other in an update. factor: of gradients. rates: of every group of every optimizer; None: its own. settings_of: of which group of
    their optimizer all groups have the settings. is_new: whether the optimizer has no state. is_empty: whether its state is zeros. zeros: which elements of the
    gradient of the parameter are zero."""

    kind: CauseKind
    what: str
    factor: float = 1.0
    rates: list[list[Any]] | None = None
    settings_of: int | None = None
    without_decay: bool = False
    is_new: bool = False
    is_empty: bool = False
    zeros: Tensor | None = None


class KeptUpdate:
    """What one device's next update is made from: copies of its optimizers, with parameters and state, and of the gradients, which are the
    plan's. before: what was kept of the update before it."""

    def __init__(self, reference: Reference, before: KeptUpdate | None) -> None:
        memo: dict[int, Any] = {}
        self._copies: dict[str, nn.Parameter] = {}
        self.gradients: dict[str, Tensor | None] = {}
        for name, each in reference.parameters.items():
            self._copies[name] = memo[id(each)] = nn.Parameter(each.detach().clone(), each.requires_grad)
            self.gradients[name] = None if each.grad is None else each.grad.detach().clone()
        self._optimizers = copies_of(reference.turn.optimizers, memo)
        self._limit = reference.turn.clip_grad_norm
        limits = {name: each.clip_grad_norm for name, each in reference.job.losses.items()}
        self._others = {
            name: each for name, each in limits.items() if each is not None and each != self._limit
        }
        self._now = reference.turn.optimizers
        self.rates = _rates(self._optimizers)
        same = before is not None and [*map(len, before.rates)] == [*map(len, self.rates)]
        self._earlier = before.rates if before and same else None

    @staticmethod
    def of(reference: Reference, before: KeptUpdate | None) -> KeptUpdate | None:
        """None where a model is large, or its update is not made from its gradients alone. To be called between `Reference.run` and
        `Reference.update`."""
        parameters = reference.parameters.values()
        if (
            reference.updated.dtype is not None
            or reference.scale.is_used
            or sum(each.numel() for each in parameters) > _SMALL
            or any(map(needs_closure, reference.turn.optimizers))
        ):
            return None
        return KeptUpdate(reference, before)

    def cause(self, differing: DifferingTensor | None, reference: StepRecord) -> Cause | None:
        """The way that gives the plan's value of a parameter, if one does. reference: one device's record of the step."""
        norm = reference.gradient_norm
        if differing is None or differing.kind not in ("update", "parameter"):
            return None
        name, ours, right = differing.name, differing.plan, differing.one_device
        if self.gradients.get(name) is None or ours.shape != right.shape:
            return None
        off = float((ours - right).norm())
        best, found = _LEFT * off, None
        for way in (*self._ways(norm), *self._ways_of_elements(name, ours, right)):
            try:
                left = float((ours - self._value(name, way, norm)).norm())
            except Exception:  # an optimizer may raise anything without the state that its constructor makes
                continue
            if left < best:
                best, found = left, way
        if found is None:
            return None
        what = f"The gradients agree, and the update of {name} is the one that one device makes {found.what}"
        return Cause(
            found.kind, f"{what}. This explains {1 - best / off:.2%} of the difference.", explains=True
        )

    def _ways(self, norm: float | None) -> Iterator[_Way]:
        limit = self._limit
        if limit is not None and norm:
            if norm > limit:
                yield _Way(kind="clipping", what="of gradients that are not clipped", factor=norm / limit)
                yield _Way(kind="clipping", what="of gradients that are clipped twice", factor=limit / norm)
            else:
                yield _Way(kind="clipping", what=f"of gradients whose norm is scaled up to the limit of {limit:g}", factor=limit / norm)  # fmt: skip
        for name, other in self._others.items() if norm else ():
            what = f"of gradients that are clipped to {other:g}, the limit of loss {name}, and not to {'none' if limit is None else f'{limit:g}'}"
            yield _Way(kind="clipping", what=what, factor=_clipping(other, norm) / _clipping(limit, norm))
        now = _rates(self._now)
        if now != self.rates:
            yield _Way(kind="optimizer", what="with the learning rates of the next step: schedules are stepped before optimizers", rates=now)  # fmt: skip
        if self._earlier is not None and self._earlier != self.rates:
            yield _Way(kind="optimizer", what="with the learning rates of the step before", rates=self._earlier)  # fmt: skip
        most = max((len(each.param_groups) for each in self._optimizers), default=0)
        for number in range(most) if most > 1 else ():
            yield _Way(kind="optimizer", what=f"with the settings of group {number}, to which it does not belong", settings_of=number)  # fmt: skip
        yield _Way(kind="optimizer", what="without weight decay", without_decay=True)
        if any(each.state for each in self._optimizers):
            yield _Way(kind="optimizer", what="with no state of the steps before, as in the first one", is_new=True)  # fmt: skip
            yield _Way(kind="optimizer", what="with zeros for its state, such as what its constructor had made", is_empty=True)  # fmt: skip

    def _ways_of_elements(self, name: str, ours: Tensor, right: Tensor) -> Iterator[_Way]:
        gradient = self.gradients[name]
        if gradient is None or gradient.is_sparse:
            return
        before = self._copies[name].detach()
        wrong = _differs(ours, right, before)
        if not bool((ours != before)[wrong].any()):  # of which gradients are one cause of several
            return
        which = (
            f"{int(wrong.sum())} of the {wrong.numel()} elements" if not bool(wrong.all()) else "all elements"
        )
        yield _Way(kind="optimizer", what=f"where {which} of its gradient are zero: they do not come to it", zeros=wrong)  # fmt: skip

    def _value(self, name: str, way: _Way, norm: float | None) -> Tensor:
        """What becomes of a parameter."""
        memo: dict[int, Any] = {}
        copies = {
            each: nn.Parameter(value.detach().clone(), value.requires_grad)
            for each, value in self._copies.items()
        }
        memo |= {id(self._copies[each]): value for each, value in copies.items()}
        optimizers = copies_of(self._optimizers, memo)
        clipped = _clipping(self._limit, norm)
        for each, value in copies.items():
            gradient = self.gradients[each]
            value.grad = None if gradient is None else gradient * (clipped * way.factor)
            if each == name and way.zeros is not None and value.grad is not None:
                value.grad[way.zeros] = 0
        with preserved_draws():
            for number, optimizer in enumerate(optimizers):
                _change(optimizer, way, way.rates[number] if way.rates else None)
                densify_gradients(optimizer)
                type(optimizer).step(optimizer)
        return copies[name].detach()


def _clipping(limit: float | None, norm: float | None) -> float:
    """What gradients of this norm are multiplied by."""
    return 1.0 if limit is None or norm is None else min(1.0, limit / (norm + 1e-6))


def other_update(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """What a wrong parameter itself shows."""
    return (
        _limited_rows(differing, reference)
        or _moved_rows(differing, reference)
        or _unmoved(differing, reference)
        or _shifted(differing, reference)
    )


def _moved_rows(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Whether only rows are wrong that one device's update leaves as they are, beside others that it moves."""
    if differing is None or differing.kind not in ("update", "parameter") or differing.plan.ndim < 2:
        return None
    ours, right, before = differing.plan, differing.one_device, reference.before.get(differing.name)
    if before is None or ours.shape != right.shape or before.shape != right.shape:
        return None
    wrong, moved = ((a != b.to(a.device)).flatten(1).any(1) for a, b in ((ours, right), (right, before)))
    if not bool(wrong.any()) or not bool(moved.any()) or bool((wrong & moved).any()):
        return None
    rows = wrong.nonzero().reshape(-1).tolist()
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    what = f"The gradients agree, and rows of {differing.name} change that one device's update leaves as they are ({shown})"
    return Cause(
        "optimizer", f"{what}: they count as used in the step, and no sample uses them.", explains=True
    )


def _limited_rows(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Whether what is wrong in a table with `max_norm` are multiples of its rows, or of parts of them, as they were before the update."""
    sides = _sides(differing, reference)
    if differing is None or sides is None or sides[0].ndim != 2 or sides[0].is_complex():
        return None
    own = reference.parameters.get(differing.name)
    tables = (
        each.max_norm
        for each in reference.model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.weight is own
    )
    limit = next((each for each in tables if each is not None), None)
    ours, right, before = sides
    wrong = _differs(ours, right, before)
    rows = wrong.any(1).nonzero().reshape(-1).tolist()
    if limit is None or not rows:
        return None
    shown: list[str] = []
    for row in rows:
        places = wrong[row].nonzero().reshape(-1)
        times = 1 + (ours - right)[row, places].double() / before[row, places].double()
        ends = [*((times.diff().abs() > _OF_ROW).nonzero().reshape(-1) + 1).tolist(), len(times)]
        if 2 * len(ends) > len(times) + 1:  # multiples of single elements say nothing
            return None
        for start, end in zip([0, *ends], ends, strict=False):
            whole = end - start == len(wrong[row])
            which = "" if whole else f"elements {int(places[start])} to {int(places[end - 1])} of "
            shown.append(f"{which}row {row} {float(times[start:end].median()):.4g} times")
    which = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    what = f"The gradients agree, and {differing.name} has before its update, of what one device has there, {which}"
    why = f"rows are limited to the norm of {limit:g} by other norms than their own, such as those of the parts that ranks hold, or others are limited"
    return Cause("optimizer", f"{what}: {why}.", explains=True)


def _unmoved(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Whether what is wrong are elements that have their values of before the update, beside others that are right."""
    sides = _sides(differing, reference)
    if differing is None or sides is None:
        return None
    ours, right, before = sides
    wrong, moved = _differs(ours, right, before), _differs(before, right, before)
    if not bool(wrong.any()) or not bool((moved & ~wrong).any()) or bool((ours != before)[wrong].any()):
        return None
    numbers = wrong.reshape(-1).nonzero().reshape(-1).tolist()
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    some = f"{len(numbers)} elements" if len(numbers) > 1 else "one element"
    which = (
        f"the update leaves {some} of {differing.name} (number {shown}) as before, which one device changes"
    )
    why = "the optimizer is not given what gradients are there, or what it makes of these is lost"
    return Cause("optimizer", f"The gradients agree, and {which}: {why}.", explains=True)


def _shifted(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Whether most elements of an update are a multiple of one device's update of the element beside them."""
    sides = _sides(differing, reference)
    if differing is None or sides is None or differing.plan.numel() < _MANY or differing.plan.is_complex():
        return None
    ours, right, before = sides
    step, own = ((each.double() - before.double()).reshape(-1) for each in (ours, right))
    told = own.abs() > 10 * _ALIKE * own.abs().max()  # those near zero fit everything
    for places, which in ((1, "before"), (-1, "behind")):
        times, found = _alike(step, own.roll(places))
        _, plain = _alike(step, own)
        share, of_own = (
            float(each[told].double().mean()) if bool(told.any()) else 0.0 for each in (found, plain)
        )
        if times and int(told.sum()) >= _MANY and share > _MOST > 2 * of_own:
            much = "" if abs(times - 1) < _ALIKE else f"{times:.4g} times "
            what = f"The gradients agree, and {float(found.double().mean()):.0%} of the elements of the update of {differing.name} are {much}those one place {which} them"
            return Cause(
                "optimizer",
                f"{what}: the optimizer is given gradients whose elements are one place off, and not those that were compared.",
                explains=True,
            )
    return None


def _sides(differing: DifferingTensor | None, reference: Reference) -> tuple[Tensor, Tensor, Tensor] | None:
    """A wrong parameter of both sides, and as it was before the update; None: that is not known, or something else is wrong."""
    if differing is None or differing.kind not in ("update", "parameter"):
        return None
    before = reference.before.get(differing.name)
    if before is None or not before.shape == differing.plan.shape == differing.one_device.shape:
        return None
    return differing.plan, differing.one_device.to(differing.plan), before.to(differing.plan)


def _differs(ours: Tensor, right: Tensor, before: Tensor) -> Tensor:
    """Which elements do, by more than rounding."""
    moved, before = (right - before.to(right)).abs().max(), before.to(right)
    unit = torch.finfo(right.dtype).eps * torch.maximum(right.abs(), before.abs())
    return (ours - right).abs() > torch.maximum(_ALIKE * moved, 4 * unit)


def _alike(one: Tensor, other: Tensor) -> tuple[float, Tensor]:
    """How many times the other's elements the one's are, in the middle, and which of them are so many times."""
    told = other.abs() > 0.1 * other.abs().max()
    times = float((one[told] / other[told]).median()) if bool(told.any()) else 0.0
    return times, (one - times * other).abs() <= _ALIKE * abs(times) * other.abs().max()


def _change(optimizer: Any, way: _Way, rates: list[Any] | None) -> None:
    groups = optimizer.param_groups
    if way.settings_of is not None and way.settings_of < len(groups):
        own = {
            key: value
            for key, value in groups[way.settings_of].items()
            if key not in ("params", "param_names")
        }
        for group in groups:
            group.update(copy.deepcopy(own))
    for number, group in enumerate(groups):
        if rates is not None and rates[number] is not None:
            group["lr"] = rates[number]
        if way.without_decay and "weight_decay" in group:
            group["weight_decay"] = 0.0
    if way.is_new:
        optimizer.state.clear()
    for state in optimizer.state.values() if way.is_empty else ():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                value.zero_()


def _rates(optimizers: Any) -> list[list[Any]]:
    """Of every group of every optimizer; None: it has none."""
    return [
        [
            float(rate) if isinstance(rate, torch.Tensor) else rate
            for group in each.param_groups
            for rate in [group.get("lr")]
        ]
        for each in optimizers
    ]

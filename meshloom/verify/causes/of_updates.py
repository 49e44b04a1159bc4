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
from meshloom.verify.reference.trained_losses import needs_closure

_SMALL = 2**22  # parameters of a model of which what an update is made from is kept
_UNIT = 2**-7 * (1 + 1e-9)  # of bfloat16, as a share of a number, at most
_LEFT = 0.03  # of the difference, that a cause may leave unexplained


@dataclass(frozen=True, kw_only=True)
class _Way:
    """What is other in an update. factor: of gradients. rates: of every group of every optimizer; None: its own. settings_of: of which group of
    their optimizer all groups have the settings. is_new: whether the optimizer has no state. is_empty: whether its state is zeros."""

    kind: CauseKind
    what: str
    factor: float = 1.0
    rates: list[list[Any]] | None = None
    settings_of: int | None = None
    without_decay: bool = False
    is_new: bool = False
    is_empty: bool = False


class KeptUpdate:
    """What one device's next update is made from: copies of its optimizers, with parameters and state, and of the gradients, which are the
    plan's. before: what was kept of the update before it."""

    def __init__(self, reference: Reference, before: KeptUpdate | None) -> None:
        memo: dict[int, Any] = {}
        self._copies: dict[str, nn.Parameter] = {}
        self._gradients: dict[str, Tensor | None] = {}
        for name, each in reference.parameters.items():
            self._copies[name] = memo[id(each)] = nn.Parameter(each.detach().clone(), each.requires_grad)
            self._gradients[name] = None if each.grad is None else each.grad.detach().clone()
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
            or any(each.grad is not None and each.grad.is_sparse for each in parameters)
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
        if self._gradients.get(name) is None or ours.shape != right.shape:
            return None
        off = float((ours - right).norm())
        best, found = _LEFT * off, None
        for way in self._ways(norm):
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
            gradient = self._gradients[each]
            value.grad = None if gradient is None else gradient * (clipped * way.factor)
        with preserved_draws():
            for number, optimizer in enumerate(optimizers):
                _change(optimizer, way, way.rates[number] if way.rates else None)
                type(optimizer).step(optimizer)
        return copies[name].detach()


def _clipping(limit: float | None, norm: float | None) -> float:
    """What gradients of this norm are multiplied by."""
    return 1.0 if limit is None or norm is None else min(1.0, limit / (norm + 1e-6))


def other_update(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """What a wrong parameter itself shows."""
    return _rounded_by_other_draws(differing, reference) or _moved_rows(differing, reference)


def _rounded_by_other_draws(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Whether elements of a parameter that is rounded by chance are one device's, or beside them."""
    if differing is None or reference.updated.dtype is None or reference.plan.precision != "bf16-stochastic":
        return None
    ours, right = differing.plan.double(), differing.one_device.double()
    if ours.shape != right.shape or bool(
        ((ours - right).abs() > _UNIT * torch.maximum(ours.abs(), right.abs())).any()
    ):
        return None
    share = float((ours != right).double().mean())
    what = f"The gradients agree, and {share:.0%} of the elements of {differing.name} are the other one of the two bfloat16 values around what one device rounds"
    return Cause("rounding", f"{what}: they are rounded by other draws.")


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

"""How far rounding moves the updates of optimizers that evaluate the loss themselves (LBFGS).

Their updates are computed of differences between the gradients of many evaluations, in this step and in those before, so a unit of
rounding in one of them may be a hundredth of an update. One device therefore takes each such update a few more times, with
evaluations of perturbed parameters. Each of these other runs begins with the parameters and gradients that one device has, and has an
optimizer state of its own, which goes on from step to step, as the plan's does.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from meshloom.verify.reference.float64_blocks import distance, norm, norm_of_all
from meshloom.verify.reference.other_precision import default_dtype
from meshloom.verify.reference.reference import Reference, clip, closure_of
from meshloom.verify.reference.reruns import perturbed_parameters
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.reference.trained_losses import needs_closure

_RUNS = 3
_TIMES = 4  # the most of a few draws, of what grows from evaluation to evaluation, is less than what the plan's own rounding may do
_EVALUATIONS = 10_000  # more than an update has

State = defaultdict[Tensor, dict[str, Any]]  # of an optimizer


class ClosureEffects:
    """Of the updates of `reference`; none where no optimizer evaluates the loss itself."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._own: dict[int, State] = {}  # identity of an optimizer that evaluates the loss -> its state
        self._states: dict[tuple[int, int], State] = {}  # number of a run and that identity -> the run's
        self._values: dict[
            tuple[int, int], dict[str, Any]
        ] = {}  # other attributes of the optimizer, likewise
        self._effects: Mapping[str, float] = {}

    def update(self) -> StepRecord:
        """The reference's update, and how far rounding moves it."""
        is_closure = any(map(needs_closure, self._reference.turn.optimizers))
        runs = [self._run(number) for number in range(_RUNS)] if is_closure else []
        record = self._reference.update()
        self._effects = self._movements(runs) if runs else {}
        return record

    def _movements(self, runs: Sequence[Mapping[str, Tensor]]) -> Mapping[str, float]:
        """By name of a parameter. runs: the parameters of each after the update."""
        right, before = self._reference.parameters, self._reference.before
        updates = {name: distance(each, before[name]) for name, each in right.items() if each.requires_grad}
        moved = [{name: distance(each[name], right[name]) for name in updates} for each in runs]
        # one that diverges says nothing
        moved = [each for each in moved if all(map(math.isfinite, each.values()))]
        size = math.hypot(*updates.values())
        # A direction is one of all parameters, so what moves it moves them alike.
        share = max((math.hypot(*each.values()) / size for each in moved if size), default=0.0)
        return {
            name: _TIMES * max([share * update, *(each[name] for each in moved)])
            for name, update in updates.items()
        }

    def of(self, name: str) -> float:
        """The most that this parameter is moved by rounding in the update, in the norm of the difference."""
        return self._effects.get(name, 0.0)

    def of_state(self, parameter: Tensor, key: str) -> float:
        """The most that what its optimizer keeps of a parameter under this name is moved by rounding, relative to its size."""
        found = 0.0
        for (_, optimizer), others in self._states.items():
            right = self._own[optimizer].get(parameter, {}).get(key)
            other = others.get(parameter, {}).get(key)
            if isinstance(right, Tensor) and isinstance(other, Tensor) and (size := norm(right)):
                off = distance(other, right) / size
                found = max(found, off if math.isfinite(off) else 0.0)
        return found

    def _run(self, number: int) -> Mapping[str, Tensor]:
        reference = self._reference
        before = {name: each.detach().clone() for name, each in reference.parameters.items()}
        closure, evaluations = closure_of(reference), 0

        def perturbed() -> float:
            nonlocal evaluations
            evaluations += 1
            if evaluations == 1:
                return closure()  # the gradients that are there
            with perturbed_parameters(reference, number * _EVALUATIONS + evaluations):
                return closure()

        with reference.rerun() as gradients, default_dtype(reference.dtype):
            for name, each in gradients.items():
                reference.parameters[name].grad = None if each is None else each.detach().clone()
            if reference.turn.clip_grad_norm is not None:
                clip(reference.model, reference.turn.clip_grad_norm, norm_of_all(reference.gradients))
            for optimizer in reference.turn.optimizers:
                self._step(number, optimizer, perturbed)
            moved = {name: each.detach().clone() for name, each in reference.parameters.items()}
            with torch.no_grad():
                for name, each in reference.parameters.items():
                    each.copy_(before[name])
        return moved

    def _step(self, number: int, optimizer: Any, closure: Callable[[], float]) -> None:
        """With what this run keeps, which is as what the optimizer keeps at first."""
        with ExitStack() as around:
            for each in _with_inner(optimizer):
                around.enter_context(self._as_in_run(number, each))
            optimizer.step(closure) if needs_closure(optimizer) else optimizer.step()

    @contextmanager
    def _as_in_run(self, number: int, optimizer: Any) -> Iterator[None]:
        own, groups = dict(vars(optimizer)), [dict(each) for each in optimizer.param_groups]
        self._own[id(optimizer)] = own["state"]
        key = number, id(optimizer)
        if key not in self._states:
            state = {each: copy.deepcopy(kept) for each, kept in own["state"].items()}
            self._states[key] = defaultdict(dict, state)
            self._values[key] = {name: tree_map(_copied, each) for name, each in _plain(optimizer).items()}
        vars(optimizer).update(self._values[key], state=self._states[key])
        try:
            yield
            self._states[key], self._values[key] = optimizer.state, _plain(optimizer)
        finally:
            vars(optimizer).clear()
            vars(optimizer).update(own)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)


_KEPT_APART = ("state", "param_groups", "defaults")


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it steps, as sharpness-aware ones do."""
    found = [optimizer]
    for each in found:
        inner = [value for value in tree_leaves(vars(each)) if isinstance(value, Optimizer)]
        found += [value for value in inner if not any(value is other for other in found)]
    return found


def _plain(optimizer: Optimizer) -> dict[str, Any]:
    """What it keeps besides the states of parameters: numbers and tensors."""

    def is_plain(value: Any) -> bool:
        return all(isinstance(each, Tensor | int | float | str | None) for each in tree_leaves(value))

    return {name: each for name, each in vars(optimizer).items() if name not in _KEPT_APART and is_plain(each)}  # fmt: skip


def _copied(value: Any) -> Any:
    is_own = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return value.detach().clone() if is_own else value

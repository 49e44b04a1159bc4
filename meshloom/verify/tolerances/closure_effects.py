"""How far rounding moves the updates of optimizers that evaluate the loss themselves (LBFGS).

Their updates are computed of differences between the gradients of many evaluations, in this step and in those before, so a unit of
rounding in one of them may be a hundredth of an update. One device therefore takes each such update a few more times, with
evaluations of perturbed parameters. Each of these other runs begins with the parameters and gradients that one device has, and has optimizers of
its own, whose states go on from step to step, as the plan's does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshloom.verify.reference.float64_blocks import distance, norm, norm_of_all
from meshloom.verify.reference.other_precision import default_dtype
from meshloom.verify.reference.reference import Reference, clip, closure_of
from meshloom.verify.reference.reference_optimizers import needs_closure
from meshloom.verify.reference.reruns import having, perturbed_parameters
from meshloom.verify.reference.step_records import StepRecord

_RUNS = 3
_TIMES = 4  # the most of a few draws, of what grows from evaluation to evaluation, is less than what the plan's own rounding may do
_EVALUATIONS = 10_000  # more than an update has


class ClosureEffects:
    """Of the updates of `reference`; none where no optimizer evaluates the loss itself."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        # number of a run and identity of an optimizer -> the run's
        self._copies: dict[tuple[int, int], Any] = {}
        self._effects: Mapping[str, float] = {}

    def update(self) -> StepRecord:
        """The reference's update, and how far rounding moves it."""
        is_closure = any(map(needs_closure, self._reference.optimizers))
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
        own = {id(each): each for each in self._reference.optimizers}
        found = 0.0
        for (_, optimizer), copied in self._copies.items():
            right, other = (each.state.get(parameter, {}).get(key) for each in (own[optimizer], copied))
            if isinstance(right, Tensor) and isinstance(other, Tensor) and (size := norm(right)):
                off = distance(other, right) / size
                found = max(found, off if math.isfinite(off) else 0.0)
        return found

    def _run(self, number: int) -> Mapping[str, Tensor]:
        reference = self._reference
        closure, evaluations = closure_of(reference), 0

        def perturbed() -> float:
            nonlocal evaluations
            evaluations += 1
            if evaluations == 1:
                return closure()  # the gradients that are there
            with perturbed_parameters(reference, number * _EVALUATIONS + evaluations):
                return closure()

        # at whose end parameters have their values again
        with (
            having(reference, reference.parameters),
            reference.rerun() as gradients,
            default_dtype(reference.dtype),
        ):
            for name, each in gradients.items():
                reference.parameters[name].grad = None if each is None else each.detach().clone()
            if reference.job.clip_grad_norm is not None:
                clip(reference.model, reference.job.clip_grad_norm, norm_of_all(reference.gradients))
            for optimizer in reference.optimizers:
                copied = self._copy_of(number, optimizer)
                copied.step(perturbed) if needs_closure(optimizer) else copied.step()
            return {name: each.detach().clone() for name, each in reference.parameters.items()}

    def _copy_of(self, number: int, optimizer: Any) -> Any:
        """The run's, of the same parameters, with the groups' settings of now."""
        key = number, id(optimizer)
        if key not in self._copies:
            copied = object.__new__(type(optimizer))
            same = [each for group in optimizer.param_groups for each in group["params"]]
            memo = {id(each): each for each in same} | {id(optimizer): copied}
            # but what a scheduler has put in the place of a method, to count steps
            own = {name: each for name, each in vars(optimizer).items() if name != "step"}
            vars(copied).update(copy.deepcopy(own, memo))
            self._copies[key] = copied
        copied = self._copies[key]
        for group, now in zip(copied.param_groups, optimizer.param_groups, strict=True):
            group.update({name: each for name, each in now.items() if name != "params"})
        return copied

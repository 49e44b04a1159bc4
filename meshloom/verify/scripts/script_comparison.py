"""Two recordings of a script's first steps, compared, and what is said of it.

The error of a tensor is ||a - b|| / max(||b||, a thousandth of the largest norm of its kind in the step). Elements of parameters
whose gradient was in some step so far no more than rounding are left out, since an optimizer that divides by a gradient's size
makes steps of full length of them; they are counted. In float64 optimizers find 0 there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from meshloom.core.units import format_count
from meshloom.verify.factors import fitted
from meshloom.verify.reference.float64_blocks import norm
from meshloom.verify.scripts.recorder import RecordedStep, most_of_rounding
from meshloom.verify.tolerances.gradient_errors import relative_errors

Kind = Literal["gradient", "parameter", "buffer", "report", "step"]


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """step: from 0. name: of the tensor; of a report its place in the step. error: infinite where there is nothing to compare it with.
    factor: of every gradient of this step, if it is the same; None: there is none."""

    step: int
    kind: Kind
    name: str
    error: float
    factor: float | None = None

    def __str__(self) -> str:
        if self.kind == "step":
            return f"one of them made {format_count(self.step, 'step')}, the other went on"
        by = f"is off by {self.error:.1e} of its size"
        if not math.isfinite(self.error):
            by = "is on one side alone, or not a number there, or of another shape"
        what = {"gradient": f"the gradient of {self.name}", "report": f"what ml.mean or ml.sum returned ({self.name})"}  # fmt: skip
        what = what.get(self.kind, f"the {self.kind} {self.name}")
        return f"step {self.step + 1}: {what} {by}"


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """steps, tensors: how many were compared. backwards: whether steps are backwards of a script that has no optimizer. worst: the
    largest error. left_out: elements of parameters. first: what differs first."""

    steps: int
    tensors: int
    worst: float
    left_out: int
    first: FirstDifference | None
    backwards: bool = False

    @property
    def equal(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.tensors > 0 and self.first is None


def compare_scripts(
    ours: Sequence[RecordedStep], theirs: Sequence[RecordedStep], tolerance: float
) -> ScriptComparison:
    """Compare up to the first step that differs."""
    worst, tensors = 0.0, 0
    rounding: dict[str, Tensor] = {}  # of each parameter, where its gradient was no more
    first: FirstDifference | None = None
    for number, (here, there) in enumerate(zip(ours, theirs, strict=False)):
        _add_rounding(rounding, here.gradients, there.gradients, tolerance)
        kinds: dict[Kind, dict[str, float]] = {
            "gradient": relative_errors(here.gradients, there.gradients),
            "parameter": relative_errors(
                _without(here.parameters, rounding), _without(there.parameters, rounding)
            ),
            "buffer": relative_errors(here.buffers, there.buffers),
            "report": relative_errors(_numbered(here), _numbered(there)),
        }
        tensors += sum(map(len, kinds.values()))
        found = [
            FirstDifference(step=number, kind=kind, name=name, error=error)
            for kind, errors in kinds.items()
            for name, error in errors.items()
        ]
        worst = max([worst, *(each.error for each in found)])
        wrong = [each for each in found if not each.error <= tolerance]
        if wrong:
            factor = common_factor(here.gradients, there.gradients, tolerance)
            first = replace(wrong[0], factor=factor)
            break
    fewest = min(len(ours), len(theirs))
    if first is None and len(ours) != len(theirs):
        first = FirstDifference(step=fewest, kind="step", name="", error=math.inf)
    left_out = sum(int(each.sum()) for each in rounding.values())
    return ScriptComparison(
        steps=fewest, tensors=tensors, worst=worst, left_out=left_out, first=first,
        backwards=any(each.optimizer is None for each in theirs),
    )  # fmt: skip


def common_factor(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], tolerance: float
) -> float | None:
    """By which all of our gradients are theirs; None: there is no one factor, or it is 1 as far as it is shown: clipping hides what it was.

    >>> common_factor({"w": Tensor([1.0, 2.0])}, {"w": Tensor([4.0, 8.0])}, 1e-6)
    0.25
    """
    pairs = {
        name: (here, there)
        for name, there in theirs.items()
        if there is not None and (here := ours.get(name)) is not None and here.shape == there.shape
    }
    factor = fitted([(here.double(), there.double()) for here, there in pairs.values()])
    scaled = {name: factor * there for name, (_, there) in pairs.items()}
    off = relative_errors({name: here for name, (here, _) in pairs.items()}, scaled)
    found = off and abs(factor - 1) > max(tolerance, 1e-6) and all(each <= tolerance for each in off.values())
    return factor if found else None


def _add_rounding(
    rounding: dict[str, Tensor], ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], tolerance: float
) -> None:  # fmt: skip
    largest = max((norm(each) for each in theirs.values() if each is not None), default=0.0)
    for name, there in theirs.items():
        here = ours.get(name)
        if here is not None and there is not None and here.shape == there.shape:
            most = most_of_rounding(there, largest, tolerance)
            found = (here != there) & (here.abs() <= most) & (there.abs() <= most)
            rounding[name] = rounding[name] | found if name in rounding else found


def _without(parameters: Mapping[str, Tensor], rounding: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: each.masked_fill(rounding[name], 0)
        if name in rounding and rounding[name].shape == each.shape
        else each
        for name, each in parameters.items()
    }


def _numbered(step: RecordedStep) -> dict[str, Tensor]:
    return {f"number {at + 1}": each for at, each in enumerate(step.reports)}

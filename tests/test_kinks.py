"""Units that are at a kink up to rounding: an input of a ReLU that is 1e-8 on one device and -1e-8 under a plan has another gradient, and
both are right. What the units do not explain differs as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.reference.reference import Reference
from tests.held import hold_against, step_of
from tests.jobs import make_job

DIVIDED = replace(Plan.parse("tp=2,microbatches=2"), keyed_draws=True)
WHOLE = replace(Plan.parse("dp=2"), keyed_draws=True)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {  # and a kink of each
    "relu": (F.relu, 0.0),
    "relu in place": (lambda x: F.relu(x, inplace=True), 0.0),
    "relu_": (lambda x: x.relu_(), 0.0),
    "leaky_relu": (F.leaky_relu, 0.0),
    "abs": (torch.abs, 0.0),
    "relu6": (nn.ReLU6(), 0.0),
    "hardtanh": (nn.Hardtanh(-0.5, 0.25), 0.25),
    "clamp": (lambda x: x.clamp(max=0.25), 0.25),
    "clamp_min": (lambda x: torch.clamp_min(x, -0.125), -0.125),
    "threshold": (nn.Threshold(0.25, 0.25), 0.25),
}


class AtAKink(nn.Module):
    """Of every chunk the input of the function that is nearest to its kink lies `off` from it, relative to what inputs are in the mean."""

    def __init__(self, function: str, off: float) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 23), nn.Linear(23, 11), nn.Linear(11, 5)
        self.function, self.kink = FUNCTIONS[function]
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.second(F.relu(self.first(x)))
        held = inputs.detach()
        away = (held - self.kink).reshape(-1)
        moved = torch.zeros_like(away)
        nearest = away.abs().argmin()
        moved[nearest] = self.off * held.square().mean().sqrt() - away[nearest]
        return self.third(self.function(inputs + moved.view(inputs.shape)))


def job(function: str, off: float) -> Job:
    return replace(make_job("mlp", "sgd", batch_size=10), model=lambda: AtAKink(function, off))


def compared(function: str, plan: Plan, one: float = 3e-7, scale: float = 1.0) -> Comparison:
    """One device is `one` off, and the plan 3e-7 on the other side, with gradients that many times as large."""
    ours = step_of(Reference(job(function, -3e-7), plan))
    gradients = {name: None if each is None else each * scale for name, each in ours.gradients.items()}
    found = hold_against(Reference(job(function, one), plan), [replace(ours, gradients=gradients)])
    return found.steps[0]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.long
def test_units_on_their_other_side_are_found(function: str):
    """One in each of the two chunks."""
    step = compared(function, DIVIDED)
    assert step.passed, [each for each in step.errors if not each.passed]
    turned = [each for each in step.errors if each.turned]
    assert {each.name for each in turned} >= {"first.weight", "first.bias", "second.bias"}
    assert {each.turned for each in turned} == {2} and all(each.error < 1e-6 for each in turned)
    assert not any(each.moved for each in step.errors)


@pytest.mark.parametrize(
    ("plan", "one", "scale"),
    [
        pytest.param(DIVIDED, 3e-7, 1 + 1e-4, id="gradients are too large as well"),
        pytest.param(DIVIDED, 1e-4, 1.0, id="farther off than rounding"),
        pytest.param(WHOLE, 3e-7, 1.0, id="operators are whole"),
    ],
)
@pytest.mark.long
def test_what_they_do_not_explain_differs(plan: Plan, one: float, scale: float):
    step = compared("relu", plan, one, scale)
    assert not step.passed and step.failed("gradient")

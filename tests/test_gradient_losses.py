"""Losses that take gradients, as papers and public repositories write them, under every plan: divided and cut, and
equal to one device.

Models this small are left whole by the choice, so they are divided at rates at which they pay, and at random, with the
share that is divided; trained, their matrices are pinned.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshloom.core.job import Evaluate
from meshloom.core.plan import Plan
from meshloom.program.cost.cost import costs
from meshloom.program.cost.cost_rules import flops
from meshloom.program.operators.convolution_gradients import gradients_apart
from meshloom.tensor_parallel.explain import account_of
from meshloom.verify.run import verify
from tests.division import at_random, compare, subject_of
from tests.gradient_jobs import JOBS, gradient_job
from tests.reports import largest_error

TOLERANCE = 1e-10  # float64; sums over samples and ranks in other orders
PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"]
COVERING = {
    "sliced score matching": "pp=2,microbatches=2",
    "forces": "tp=2",
    "hamiltonian": "dp=2,zero=3",
}
MOSTLY_DIVIDED = 0.85  # of the parameters and of the FLOPs

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def pinned(name: str, plan: str) -> Plan:
    """The plan, with the first matrix of the model divided along its outputs, where it has tp."""
    found = Plan.parse(plan)
    if found.tp == 1:
        return found
    model, *_ = JOBS[name]
    first = next(path for path, each in model().named_parameters() if each.ndim > 1)
    return replace(found, tp_placements={first: "dim0"})


@pytest.mark.covering("hamiltonian", "sliced")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=() if COVERING.get(name) == plan else pytest.mark.slow, id=f"{name} {plan}")
        for name in JOBS
        for plan in PLANS
    ],
)  # fmt: skip
def test_a_loss_that_takes_gradients_is_one_devices(name: str, plan: str):
    settings = {}
    if name in ("forces", "heat equation"):
        job = gradient_job(name)
        metrics = {"with gradients": torch.enable_grad()(job.loss)}
        settings = {"evaluate": Evaluate(data=job.data, metrics=metrics, every=1)}
    report = verify(
        gradient_job(name, **settings), pinned(name, plan), devices="simulated", steps=2, dtype=torch.float64
    )
    assert report is not None
    assert report.passed, report.causes
    assert largest_error(report) <= TOLERANCE
    if "tp=" in plan and "pp=" not in plan:
        assert max(report.owned) < 1


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in ("heat equation", "forces", "maml", "gradient penalty") else pytest.mark.slow) for each in JOBS],
)  # fmt: skip
def test_its_operators_are_divided(name: str, num_ranks: int):
    subject = subject_of(gradient_job(name))
    compared = compare(subject, num_ranks)
    assert compared.error <= TOLERANCE, compared.what
    account = account_of(compared.partition, costs(subject.program))
    assert min(account.parameters_divided, account.flops_divided) >= MOSTLY_DIVIDED, account.whole


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", JOBS)
def test_any_division_is_one_devices(name: str, seed: int):
    compared = compare(subject_of(gradient_job(name)), 2 + seed % 2, at_random(seed))
    assert compared.error <= TOLERANCE, compared.what


def test_operators_of_a_gradient_belong_to_the_module_of_their_forward():
    program = subject_of(gradient_job("heat equation")).program
    of_backward = [node.path for node in program.nodes if node.operator == "tanh_backward"]
    assert of_backward and set(of_backward) == {"1", "3"}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution_apart_are_those_together(transposed: bool, groups: int):
    """With their own gradients, to the third order."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 7, 5, generator=source, dtype=torch.float64, requires_grad=True)
    shape = (4, 6 // groups, 3, 2) if transposed else (6, 4 // groups, 3, 2)
    weight = torch.randn(shape, generator=source, dtype=torch.float64, requires_grad=True)
    how = [2, 1], [1, 0], [1, 2], transposed, [0, 0], groups
    y = torch.ops.aten.convolution(x, weight, None, *how)
    gradient = torch.randn(y.shape, generator=source, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (gradients_apart, torch.ops.aten.convolution_backward):
        first = function(gradient, x, weight, [y.shape[1]], *how, [True, True, True])
        total = sum((each**2).sum() for each in first)
        second = torch.autograd.grad(total, (gradient, x, weight), create_graph=True)
        third = torch.autograd.grad(sum(each.sum() for each in second), (gradient, x, weight))
        found.append((*first, *second, *third))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-9)  # values of up to a thousand


def test_flops_of_a_convolutions_gradients_are_those_that_torch_counts():
    x, weight, how = (
        torch.randn(3, 4, 7, 5),
        torch.randn(6, 4, 3, 2),
        ([2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    )
    gradient = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *how))
    with FlopCounterMode(display=False) as counter:
        torch.ops.aten.convolution_backward(gradient, x, weight, None, *how, [True, True, False])
    ours = torch.ops.meshloom
    found = sum(
        flops(operator.default, (gradient, other, list(size.shape), *how), {}, size)
        for operator, other, size in (
            (ours.convolution_input_gradient, weight, x),
            (ours.convolution_weight_gradient, x, weight),
        )
    )
    assert found == counter.get_total_flops()


def test_a_detach_of_the_users_stays():
    """Autograd's own detaches of what it saves are taken out of the trace: with them gradients were 1e-3 off."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_(True)
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (
            (slope**2 * u.detach().sum()).mean()
            + (slope.data * u.sum()).mean()
            + (torch.detach(slope) * u).sum()
        )

    subject = subject_of(gradient_job("langevin", loss=loss))
    assert compare(subject, 2).error <= TOLERANCE
    assert sum(node.operator == "detach" for node in subject.program.nodes) == 3


def test_a_gradient_through_an_opaque_part_is_taken_in_one_operator():
    report = verify(
        gradient_job("heat equation", opaque=("3",)),
        Plan.parse("tp=2"),
        devices="simulated",
        dtype=torch.float64,
    )
    assert report and report.passed, report and report.causes
    assert largest_error(report) <= 1e-10

"""Losses that take gradients inside are one device's under every plan: their gradients are operators of the program.

Found from outside: under tp and pp they ended in "We found a fake tensor in the exported program constant's
list" without a line, some with a traceback, and verifying `vmap(jacrev)` under dp in an error of vmap's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F

from meshloom.core.errors import CaptureError
from meshloom.program.trace.inner_gradients import transforms_ended
from meshloom.train.trainer import Trainer
from tests.loss_jobs import job_of
from tests.reports import largest_error
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

Batch = dict[str, Tensor]


def physics_informed(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # here
    return (slope**2).mean() + F.cross_entropy(model(batch["x"]), batch["y"])


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)  # here
    return loss + 0.1 * sum((each**2).sum() for each in gradients)


def langevin(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].detach().requires_grad_(True)
    for _ in range(2):
        (force,) = torch.autograd.grad(model(x).sum(), x)  # here
        x = (x - 0.1 * force).detach().requires_grad_(True)
    return model(x).pow(2).mean()


def backward(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    model(x).sum().backward(inputs=[x], create_graph=True)  # here
    assert x.grad is not None
    return (x.grad**2).mean()


def maml(model: nn.Module, batch: Batch) -> Tensor:
    parameters = dict(model.named_parameters())

    def inner(parameters: dict[str, Any]) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (batch["x"],)), batch["y"])

    gradients = grad(inner)(parameters)  # here
    return inner({name: each - 0.1 * gradients[name] for name, each in parameters.items()})


def jacobian(model: nn.Module, batch: Batch) -> Tensor:
    slopes = vmap(jacrev(model))(batch["x"])  # here
    return slopes.pow(2).mean() + F.cross_entropy(model(batch["x"]), batch["y"])


def directional(model: nn.Module, batch: Batch) -> Tensor:
    slope = jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))[1]  # here
    return slope.pow(2).mean()


LOSSES: list[Callable[[nn.Module, Batch], Tensor]] = [
    physics_informed,
    gradient_penalty,
    langevin,
    backward,
    maml,
    jacobian,
    directional,
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_with_dp_they_are_one_device(loss: Callable[[nn.Module, Batch], Tensor]):
    equals_one_device(job_of(loss), "dp=2,microbatches=2", steps=3)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,pp=2,tp=2"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_where_a_program_is_needed_they_are_one_device(loss: Callable[[nn.Module, Batch], Tensor], plan: str):
    report = equals_one_device(job_of(loss), plan, steps=3)
    assert largest_error(report) <= 1e-10  # sums over ranks in other orders
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0  # type: ignore[attr-defined]


def test_what_a_loss_adds_to_gradients_of_parameters_is_refused_with_its_line():
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        (0.1 * value).backward(retain_graph=True)  # here
        return value

    lines, first = inspect.getsourcelines(loss)
    line = first + next(number for number, text in enumerate(lines) if "# here" in text)
    with (
        pytest.raises(CaptureError) as refused,
        Trainer(job_of(loss), "tp=2,recompute=full", devices="simulated"),
    ):
        pass
    assert "The loss adds to the gradient of 0.weight" in str(refused.value)
    assert f"test_inner_gradients.py:{line}" in str(refused.value)
    assert "Plans with dp and zero alone run the module as it is" in str(refused.value)


def test_a_transform_that_was_left_half_way_is_over():
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    with transforms_ended():
        functorch._grad_increment_nesting()
        assert functorch.get_dynamic_layer_stack_depth() == 1
    assert functorch.get_dynamic_layer_stack_depth() == 0

"""Batch norm of a chunk of one sample, of which torch's gradients on CPUs may be wrong: programs have right ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.plan import Plan
from meshloom.program.capture.capture import capture_module
from meshloom.program.run.batch_norms import AlignedGradients, aligned
from meshloom.program.run.execute import run_program
from meshloom.verify.reference.observers import SingleSamples
from tests.jobs import class_loss, images, make_job
from tests.verified import equals_one_device

# One kernel in place of others that sum in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-12}
SHAPES = [(1, 2, 3, 3), (1, 2, 1, 3), (1, 3, 2, 2, 3), (2, 2, 3, 3), (1, 2, 4)]
aten = torch.ops.aten


def layouts(shape: Sequence[int]) -> Iterator[Tensor]:
    """Equal values with channels first or last in memory, and samples anywhere between: the stride of one says nothing."""
    torch.manual_seed(len(shape))
    x = torch.randn(tuple(shape), dtype=torch.float64)
    inner = [*range(2, len(shape))]
    for order, at in itertools.product(([1, *inner], [*inner, 1]), range(len(shape))):
        whole = [*order[:at], 0, *order[at:]]
        yield x.permute(whole).contiguous().permute([whole.index(dim) for dim in range(len(shape))])


def gradients(norm: Callable[..., Tensor], x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Of x, weight and bias."""
    weight, bias = (torch.full((x.shape[1],), each, dtype=x.dtype, requires_grad=True) for each in (1.5, 0.5))
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(norm(leaf, weight, bias), (leaf, weight, bias), gradient)


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    others = [dim for dim in range(x.ndim) if dim != 1]
    mean, variance = (f(x, others, keepdim=True) for f in (torch.mean, partial(torch.var, correction=0)))
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - mean) / (variance + 1e-5).sqrt() * weight.view(shape) + bias.view(shape)


def of_program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return aligned(aten.batch_norm.default, x, weight, bias, None, None, True, 0.1, 1e-5, False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.long
def test_gradients_are_right_in_every_layout(shape: tuple[int, ...]):
    wrong = 0
    for x, gradient in itertools.product(layouts(shape), layouts(shape)):
        right = gradients(plain, x, gradient)
        found = [gradients(of_program, x, gradient)]
        for context in (AlignedGradients(), SingleSamples()):
            with context:
                found.append(gradients(_normed, x, gradient))
        for each in found:
            torch.testing.assert_close(each, right, **EXACT)
        torchs = gradients(_normed, x, gradient)
        wrong += not all(torch.allclose(a, b) for a, b in zip(torchs, right, strict=True))
    assert (wrong > 0) == (shape[0] == 1 and len(shape) > 3)  # else nothing needs to be aligned any more


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


class Projected(nn.Module):
    """Pictures [batch, 1, 6, 6] -> [batch, 5], through a convolution, a norm and a linear layer of its places and a token, whose
    gradient is a part of a larger one."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = norm(6)
        self.token = nn.Parameter(torch.ones(1, 1, 6))
        self.second = nn.Linear(6, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        places = torch.cat((self.token.expand(len(h), -1, -1), h.view(len(h), 6, -1).permute(0, 2, 1)), 1)
        return self.head(torch.tanh(self.second(places)).square().mean(1))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "instance": partial(nn.InstanceNorm2d, affine=True),
}


@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.long
def test_a_program_has_right_gradients(norm: str):
    torch.manual_seed(0)
    model = Projected(NORMS[norm]).double()
    batch = {"x": torch.randn(1, 1, 6, 6, dtype=torch.float64), "y": torch.tensor([2])}
    program = capture_module(model, class_loss, (batch, {**batch, "x": batch["x"] + 1}))
    found: list[list[Tensor]] = []
    state = dict(model.named_parameters()), dict(model.named_buffers())
    for context in (nullcontext(), AlignedGradients()):
        with context:
            loss = class_loss(model, batch)
            found.append([*torch.autograd.grad(loss, list(model.parameters()))])
    of_program = torch.autograd.grad(run_program(program, *state, batch), list(model.parameters()))
    torch.testing.assert_close(list(of_program), found[1], **EXACT)
    assert not all(map(torch.allclose, *found))


@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=2, microbatches=3, tp_placements={"first.weight": "dim0"}),
        Plan(pp=2, microbatches=3),
        Plan(dp=3),
    ],
    ids=str,
)
@pytest.mark.slow
def test_plans_are_compared_with_what_they_compute(plan: Plan):
    job = make_job("cnn", "sgd", batch_size=3, loss=class_loss, data=partial(images, 9))
    job = replace(job, model=lambda: Projected(nn.BatchNorm2d))
    equals_one_device(job, plan, dtype=None)


class Called(Projected):
    """As `Projected`, with the norm as a function."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__(norm)
        self.norm = Function()


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, training=True)


@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize("plan", ["tp=2,microbatches=3", "pp=2,microbatches=3"])
@pytest.mark.parametrize(
    "model",
    [partial(Projected, nn.BatchNorm2d), partial(Called, nn.BatchNorm2d)],
    ids=["a norm", "a function"],
)
@pytest.mark.slow
def test_leaves_have_right_gradients(model: Any, plan: str):
    job = make_job("cnn", "sgd", batch_size=3, loss=class_loss, data=partial(images, 9))
    equals_one_device(replace(job, model=model, leaves=["norm"]), plan, dtype=None)

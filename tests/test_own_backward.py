"""Autograd functions with a backward of their own: read if it multiplies what arrives, refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.program.capture.capture import capture_module
from meshloom.program.capture.check import check_against_module
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.operators.autograd_functions import MAX_TRIED

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class Rounds(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class ClippedRoot(torch.autograd.Function):
    """A root whose derivative is at most 1: not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x.abs().sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.scale * gradient * (0.5 * x.sign() * x.abs().rsqrt()).clamp(-1, 1), None


class Gated(torch.autograd.Function):
    """Two inputs, in the form with a context of its own."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return gradient * y.sigmoid(), 2 * gradient * x  # a gradient that somebody chose


class Quantised(torch.autograd.Function):
    """With arguments that a call may leave out: a gradient for each of them, as torch takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, mode: str = "round", clip: bool = True) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clip = clip
        return getattr(torch, mode)(x * levels) / levels

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert ctx.needs_input_grad[1:] == (False,) * (len(ctx.needs_input_grad) - 1)
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1) if ctx.clip else gradient, None, None, None


class Turned(torch.autograd.Function):
    """Its backward moves elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.flip(0)


class Squares(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.square()


class Sums(torch.autograd.Function):
    """Gives another shape than it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient[:, None].expand(5, 3)


def loss_of(apply: Any) -> Any:
    return lambda model, batch: (apply(model(batch)) * batch).sum()


def batches(count: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(7)
    return [torch.randn(5, 3, generator=source) for _ in range(count)]


@pytest.mark.parametrize(
    "apply",
    [
        Rounds.apply,
        lambda x: ClippedRoot.apply(x, 3.0),
        lambda x: Gated.apply(x, x.cos()),
        lambda x: Gated.apply(x, x.detach()),
        lambda x: Quantised.apply(x, 7) + Quantised.apply(x, 3, "floor", False),
    ],
    ids=["rounds", "clipped root", "gated", "gated by what has no gradient", "arguments left out"],
)
def test_its_value_and_its_gradient_are_kept(apply: Any):
    model, loss, (one, two, *fresh) = nn.Linear(3, 3), loss_of(apply), batches(4)
    program = capture_module(model, loss, (one, two))
    # the backward's product may have another order
    check_against_module(program, model, loss, fresh, tolerance=1e-6)


def test_raw_export_has_the_gradient_of_the_operators_instead():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Rounds.apply(self.layer(x)).sum()

    (batch,) = batches(1)
    raw = torch.export.export(Loss(), (batch,), strict=False).module()
    gradients = torch.autograd.grad(raw(batch), list(raw.parameters()))
    assert all(not gradient.any() for gradient in gradients)  # rounding has the derivative 0


@pytest.mark.parametrize("function", [Turned, Squares, Sums])
def test_another_backward_is_refused(function: Any):
    with pytest.raises(
        CaptureError,
        match=rf"{function.__name__}.apply at .*test_own_backward.py:\d+ .* unless it multiplies the incoming gradient",
    ):
        capture_module(
            nn.Linear(3, 3), lambda model, batch: function.apply(model(batch)).sum(), (*batches(2),)
        )


def test_a_call_whose_shape_depends_on_values_is_refused_for_that():
    """Equal calls were looked for by sizes that nobody knows: a TypeError, also where the line would have become a leaf."""
    with pytest.raises(CaptureError, match=r"The shape of the result of aten.index.Tensor at .*Rounds.apply"):
        capture_module(
            nn.Linear(3, 3),
            lambda model, batch: Rounds.apply(model(batch)[batch.sum(1) > 0]).sum(),
            (*batches(2),),
        )


def test_its_backward_is_tried_once_and_on_small_tensors():
    """BLOOM-560M did not end in 150 s: its activation was tried in each of 24 blocks, thrice, on tensors of 8
    million elements."""
    tried: list[int] = []

    class Watched(Rounds):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:  # numbers, not shapes
                tried.append(x.numel())
            return x.round()

    job = Job(
        model=lambda: nn.Linear(4096, 4096),
        loss=lambda model, batch: Watched.apply(Watched.apply(model(batch))).sum(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=list,
        batch_size=1,
        steps=1,
    )
    capture_shapes(job, torch.zeros(1, 1).expand(2048, 4096))
    assert len(tried) == 3 and max(tried) <= MAX_TRIED


def test_a_function_for_one_shape_alone_is_tried_on_it():
    class Wide(Rounds):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.reshape(300, 300).round().reshape(x.shape)

    program = capture_module(
        nn.Linear(3, 300),
        lambda model, batch: Wide.apply(model(batch)).sum(),
        (torch.ones(300, 3), torch.zeros(300, 3)),
    )
    assert program.nodes

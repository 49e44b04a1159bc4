"""Writes through views: the program has none and computes the same, value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import CaptureError
from meshloom.program.capture.capture import capture_module
from meshloom.program.capture.check import check_against_module
from meshloom.program.run.execute import run_program

# Views of a tensor [4, 6].
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(8, 3)[2:5],
    "reshape": lambda x: x.reshape(2, 12)[1],
    "flatten": lambda x: x.flatten()[3:20:2],
    "unflatten": lambda x: x.unflatten(1, (2, 3))[:, 1],
    "unsqueeze": lambda x: x.unsqueeze(1)[:, 0, 2:],
    "squeeze": lambda x: x[1:2].squeeze(0),
    "transpose": lambda x: x.transpose(0, 1)[2:4],
    "t": lambda x: x.t()[1],
    "T": lambda x: x.T[:2],
    "mT": lambda x: x.mT[::3],
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1)[1:3],
    "movedim": lambda x: x.view(2, 2, 6).movedim(0, 2)[:, 1],
    "swapaxes": lambda x: x.swapaxes(0, 1)[0],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "slice of slice": lambda x: x[1:, ::2][:, 1:],
    "negative slice": lambda x: x[-2:, -3:-1],
    "select": lambda x: x.select(1, -1),
    "diagonal": lambda x: x.diagonal(1),
    "two dims": lambda x: x[1:3, 4:],
    "none": lambda x: x,
    "view_as": lambda x: x.view_as(torch.empty(6, 4))[1:],
    "expand of itself": lambda x: x.expand(4, 6)[0],
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda v: v.mul_(3),
    "add_ of itself": lambda v: v.add_(v.clone()),
    "fill_": lambda v: v.fill_(2),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.arange(v.numel(), dtype=torch.float32).view(v.shape)),
    "copy_ of one": lambda v: v.copy_(torch.tensor(1.5, dtype=torch.float64)),
    "masked_fill_": lambda v: v.masked_fill_(torch.ones(v.shape, dtype=torch.bool), 4.0),
    "sin_": lambda v: v.sin_(),
    "setitem": lambda v: v.__setitem__(..., 0.5),
}

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class Writes(nn.Module):
    """Makes views before and after a write through one, and uses all."""

    def __init__(self, view: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
        self.view, self.write = view, write

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        early, late = y[1:], y.view(-1)[::5]
        self.write(self.view(y))
        y[0].mul_(0.5)
        other = self.view(y)
        other = torch.view_as_real(other) if other.is_complex() else other
        return (y * x).sum() + early.square().sum() + late.sum() + (other * 3).square().mean()


def check(view: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]) -> None:
    model, loss = Writes(view, write), lambda model, batch: model(batch)
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    program = capture_module(model, loss, (batches[0], batches[1]))
    assert not any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.nodes
    )
    # gradients of pieces are summed in another order
    check_against_module(program, model, loss, batches[2:], tolerance=1e-6)


@pytest.mark.covering("narrow", "expand of itself", "diagonal")
@pytest.mark.parametrize("view", VIEWS)
def test_write_through_a_view(view: str):
    check(VIEWS[view], WRITES["mul_"])


@pytest.mark.covering("masked_fill_", "setitem", "add_ of itself")
@pytest.mark.parametrize("write", WRITES)
def test_every_kind_of_write(write: str):
    check(VIEWS["two dims"], WRITES[write])
    check(VIEWS["none"], WRITES[write])


def test_precision_of_the_target_is_kept():
    class Promotes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to(torch.bfloat16)
            y += torch.full((3,), 1.0 / 3.0)  # bfloat16 + float32 in place stays bfloat16
            return y.sum()

    model, loss = Promotes(), lambda model, batch: model(batch)
    program = capture_module(model, loss, (torch.randn(2, 3), torch.randn(2, 3)))
    assert {
        str(output.dtype)
        for node in program.nodes
        for output in node.outputs
        if node.operator == "out_of_place"
    } == {"torch.bfloat16"}
    check_against_module(program, model, loss, [torch.randn(2, 3)], tolerance=0.0)


def test_shape_changed_in_place():
    class Squeezes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.unsqueeze_(0).mul_(3)
            return y.sum(0).square().sum()

    model, loss = Squeezes(), lambda model, batch: model(batch)
    program = capture_module(model, loss, (torch.randn(2, 3), torch.randn(2, 3)))
    check_against_module(program, model, loss, [torch.randn(2, 3)], tolerance=0.0)


class Assigns(nn.Module):
    """Puts another tensor in the place of a buffer, twice, and uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean
        self.mean = self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean).square().sum()


def test_a_buffer_that_is_assigned_is_updated():
    model, loss, batch = Assigns(), lambda model, batch: model(batch), torch.randn(4, 3)
    program = capture_module(model, loss, (batch, torch.randn(4, 3)))
    assert set(program.updates) == {"mean"} and not model.mean.any()
    check_against_module(program, model, loss, [torch.randn(4, 3) for _ in range(3)], tolerance=0.0)


def test_batch_is_not_written():
    model, loss = nn.Linear(3, 2), lambda model, batch: model(batch.mul_(2)).sum()
    program = capture_module(model, loss, (torch.randn(2, 3), torch.randn(2, 3)))
    batch = torch.randn(2, 3)
    kept = batch.clone()
    value = run_program(program, dict(model.named_parameters()), {}, batch)
    assert torch.equal(batch, kept)
    assert torch.equal(value, loss(model, kept))


def test_two_tensors_written_at_once_are_refused():
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, places = torch.empty(3), torch.empty(3, dtype=torch.int64)
            torch.max(x, 0, out=(values, places))
            return values.sum()

    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match=r"max at .*test_mutation.py:\d+ .* writes to more than one tensor"),
    ):
        capture_module(Both(), lambda model, batch: model(batch), (torch.randn(2, 3), torch.randn(2, 3)))


def _unseen(write: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def written(y: Tensor) -> None:
        with torch.no_grad():
            write(y)

    return written


HIDDEN: dict[str, Callable[[Tensor], object]] = {
    "detach": lambda y: y.detach().clamp_(-0.3, 0.2),
    "data": lambda y: y.data.masked_fill_(y.data < 0, -3.0),
    "data, by a mask": lambda y: y.data.__setitem__(y.data > 0.3, 0.5),
    "no_grad": _unseen(lambda y: y.clamp_(min=0.1)),
    "no_grad, through a view": _unseen(lambda y: y[1:3].mul_(2)),
}


@pytest.mark.covering("data", "no_grad, through a view")
@pytest.mark.parametrize("write", HIDDEN)
def test_a_write_that_autograd_does_not_see_leaves_the_gradient(write: str):
    """As `GaussianNLLLoss` clamps variances, and as people mask scores through `.data`."""
    check(lambda y: y, HIDDEN[write])

"""Jobs with parts that cannot be captured, each a module between two readable layers of a small network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.verified import report_on

WIDTH, LENGTH, SAMPLES = 12, 5, 24


class Readable(nn.Module):
    """An MLP with a residual path."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Router(nn.Module):
    """A mixture of experts as eager code writes it: which rows an expert computes depends on values."""

    def __init__(self, width: int = WIDTH, num_experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                result.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + result.view_as(x)


class Sorted(torch.autograd.Function):
    """A function whose backward is no product with what arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value, order = x.sort(-1)
        ctx.save_for_backward(order)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return 2 * torch.zeros_like(gradient).scatter(-1, order, gradient)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Sorted.apply(self.linear(x))


class Branches(nn.Module):
    """What runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x) if x.detach().mean().item() > 0 else self.one(x) - self.other(x)


class WithNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * torch.from_numpy(numpy.tanh(y.detach().numpy()))


class Counts(nn.Module):
    """Buffers that it writes, as batch norm does, in an unreadable forward."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training and float(y.detach().abs().sum()) >= 0:
            with torch.no_grad():
                self.mean.mul_(1 - self.momentum).add_(y.flatten(0, -2).mean(0), alpha=self.momentum)
        return y


class Drops(nn.Module):
    """Dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.drop = Router(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.router(self.drop(x)))


class Packed(nn.Module):
    """An LSTM over packed sequences, whose lengths are read from values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x.detach()[:, :, 0].abs() > 0.5).sum(1).clamp(max=LENGTH - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)
        return y


class Hooked(nn.Module):
    """A forward hook and a pre-hook that look at values, and a full backward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_pre_hook(
            lambda module, args: (args[0] * (1.5 if args[0].detach().sum().item() > 0 else 0.5),)
        )
        self.linear.register_forward_hook(lambda module, args, y: y + args[0].detach().max().item())
        self.linear.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Frozen(nn.Module):
    """Some of its parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.router.experts[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x)


class LeavesLoss(nn.Module):
    """Leaves a balancing loss in an attribute, and takes and returns structures."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.extra: Tensor | None = None

    def forward(self, values: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        x = values["x"]
        y = self.router(x) * scale
        self.extra = 0.1 * y.square().mean() if y.detach().sum().item() < 1e9 else y.mean()
        return y, {"same": x, "name": "router", "norm": y.detach().norm()}


class UsesLeft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = LeavesLoss()

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.part({"x": x}, scale=0.7)
        assert self.part.extra is not None
        return y + more["same"] * self.part.extra / (1 + more["norm"])


class ValueShapes(nn.Module):
    """Its inner module returns as many rows as values say, and is no operator."""

    class Select(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > 0]

    def __init__(self) -> None:
        super().__init__()
        self.select, self.linear = ValueShapes.Select(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        return x + self.linear(self.select(rows)).sum(0)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(_Scriptable())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class _Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if bool(y.sum() > 0):
            y = y * 2.0
        return y


class Normed(nn.Module):
    """Running statistics, which torch writes without counting a write. cumulative: averages over all chunks."""

    def __init__(self, *, cumulative: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None if cumulative else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            return x
        return self.norm(self.linear(x).flatten(0, 1)).view_as(x)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "router": Router, "own function": OwnFunction, "branches": Branches, "numpy": WithNumpy, "buffers": Counts, "dropout": Drops, "packed": Packed, "hooks": Hooked,
    "frozen": Frozen, "attribute": UsesLeft, "scripted": Scripted, "normed": Normed, "normed over all chunks": partial(Normed, cumulative=True),
}  # fmt: skip


class Net(nn.Module):
    """Readable layers around parts. order: "r" is a readable layer, a digit the part of that number."""

    def __init__(self, parts: Sequence[nn.Module], order: str = "r0r", *, evaluating: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.blocks = nn.ModuleList(Readable() for each in order if each == "r")
        self.head = nn.Linear(WIDTH, 2)
        self.order = order
        self.evaluating = evaluating

    def forward(self, x: Tensor) -> Tensor:
        x, blocks = self.embed(x), iter(self.blocks)
        for each in self.order:
            x = next(blocks)(x) if each == "r" else self.parts[int(each)](x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def data() -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(LENGTH, 3, generator=source), "y": torch.randn(LENGTH, 2, generator=source)}
        for _ in range(SAMPLES)
    ]


def job_of(
    model: Callable[[], nn.Module], *, leaves: Sequence[str | type[nn.Module]] = (), **more: Any
) -> Job:
    """A job of a model for these data."""
    return Job(
        model=model,
        loss=more.pop("loss", loss),
        optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-2),
        data=data,
        batch_size=8,
        steps=3,
        leaves=leaves,
        **more,
    )


def part_job(name: str) -> Job:
    """The job of one kind of part."""
    return job_of(lambda: Net([PARTS[name]()]))


def equal(job: Job, plan: str) -> bool:
    """Whether a plan computes what one device computes."""
    report = report_on(job, plan)
    return report.passed

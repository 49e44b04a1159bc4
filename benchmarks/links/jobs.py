"""Jobs whose compute is sleeping, so that more ranks than cores are as fast as as many machines: links and
waiting are what is measured.

`links::work` hands on its input, and sleeps for every element of it, twice as long in backward. So its time
divides as that of real layers does: over samples (dp), over stages (pp), over features (tp, by its rule).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

WIDTH, HIDDEN, LENGTH, BLOCKS = 128, 512, 16, 8


@torch.library.custom_op("links::work", mutates_args=())
def work(x: Tensor, seconds_per_element: float) -> Tensor:
    """x [...], after seconds_per_element for each element."""
    time.sleep(x.numel() * seconds_per_element)
    return x.clone()


@work.register_fake
def _(x: Tensor, seconds_per_element: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.seconds_per_element = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    time.sleep(2 * gradient.numel() * ctx.seconds_per_element)
    return gradient, None


work.register_autograd(_backward, setup_context=_keep)


class Block(nn.Module):
    """[batch, length, width] -> the same. seconds: that a sample takes, forward and backward."""

    def __init__(self, seconds: float, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.seconds_per_element = seconds / (3 * hidden * LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(work(F.relu(self.up(x)), self.seconds_per_element))


class Chain(nn.Module):
    """[batch, length, width] -> the same, in `BLOCKS` blocks."""

    def __init__(self, seconds: float, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds / BLOCKS, width, hidden) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sleeping_job(
    *,
    seconds: float,
    batch_size: int,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    update_seconds: float = 0.0,
    steps: int,
) -> ml.Job:
    """A chain of blocks on random data.

    seconds: of a sample, forward and backward through all blocks. update_seconds: slept in every optimizer
        step, which no plan divides.
    """

    def data() -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(*(torch.randn(batch_size, LENGTH, width, generator=generator) for _ in range(2)))

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=1e-3)
        if update_seconds:
            made.register_step_pre_hook(lambda *_: time.sleep(update_seconds))
        return made

    return ml.Job(
        model=lambda: Chain(seconds, width, hidden),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=optimizer,
        data=data,
        batch_size=batch_size,
        steps=steps,
        rules={"links::work": "b* -> b*"},
        elementwise=True,  # the hook, which only sleeps
    )

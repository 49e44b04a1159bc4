"""Trained parameters that a forward writes: under dp each replica writes its own, under tp and pp the leaf does, and zero=3
refuses them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.covering import few, slow
from tests.jobs import class_loss
from tests.jobs_in_memory import integers, job_of, normal
from tests.verified import equals_one_device

DATA = {"x": normal(1, 7), "y": integers(2, 5)}


class Masked(nn.Module):
    """A layer between two others whose weight it writes before it reads it."""

    def __init__(self, write: Callable[[nn.Linear, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(9, 9), write
        self.register_buffer("mask", (torch.arange(81).reshape(9, 9) % 3 > 0).float())
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.linear, self.mask)
        return self.linear(x)


class Between(nn.Module):
    def __init__(self, write: Callable[[nn.Linear, Tensor], None]) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(7, 80), nn.Tanh(), nn.Linear(80, 9))
        self.b, self.c = Masked(write), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def multiplied(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data *= mask


def assigned(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data = linear.weight.data * mask


@torch.no_grad()
def clamped(linear: nn.Linear, mask: Tensor) -> None:
    for each in linear.parameters():
        each.clamp_(-0.1, 0.1)


def drawn(linear: nn.Linear, mask: Tensor) -> None:
    nn.init.normal_(linear.bias)


def made_anew(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * mask)


def between(write: Callable[[nn.Linear, Tensor], None], **settings: Any) -> Job:
    return replace(job_of(partial(Between, write), class_loss, DATA), **settings)


LEAF = {"leaves": [Masked]}


@pytest.mark.parametrize(
    ("plan", "settings"),
    [slow("dp=2", {}), ("tp=2", LEAF), pytest.param("pp=2,microbatches=2", {}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("write", few([assigned, multiplied, clamped], 1, pytest.mark.slow))
@pytest.mark.long
def test_what_a_forward_writes_is_one_device_s(write: Any, plan: str, settings: dict[str, Any]) -> None:
    job = between(write, **settings)
    equals_one_device(job, plan, steps=3)


REFUSED = [
    (multiplied, "dp=2,zero=3", {}, "b.linear.weight was changed in a forward .* use zero=2"),
    (drawn, "dp=2", {}, "differ.*b.linear.bias|b.linear.bias.*differ"),
    (made_anew, "tp=2", LEAF, "it puts another parameter in the place of linear.weight"),
]


@pytest.mark.parametrize(("write", "plan", "settings", "why"), REFUSED)
@pytest.mark.long
def test_what_would_not_be_one_device_s_is_refused(
    write: Any, plan: str, settings: dict[str, Any], why: str
) -> None:
    with (
        pytest.raises(MeshloomError, match=why),
        Trainer(between(write, **settings), plan, devices="simulated", listener=QUIET) as trainer,
    ):
        trainer.step(next(trainer.batches()))

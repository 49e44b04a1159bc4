"""Trained parameters that a forward or a loss writes: what every forward leaves alike is one device's; the rest is refused
by name before the first step, with the reason (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.covering import few
from tests.jobs import class_loss
from tests.zoo import integers, job_of, normal

DATA = {"x": normal(1, 7), "y": integers(2, 5)}
PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"]


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
        self.a, self.b, self.c = nn.Linear(7, 9), Masked(write), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def multiplied(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data *= mask


def assigned(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data = linear.weight.data * mask


@torch.no_grad()
def copied(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.copy_(linear.weight * mask)


def clamped(linear: nn.Linear, mask: Tensor) -> None:
    for each in linear.parameters():
        each.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamped_at_once(linear: nn.Linear, mask: Tensor) -> None:
    torch._foreach_clamp_max_([linear.weight, linear.bias], 0.1)  # pyright: ignore[reportPrivateUsage]


@torch.no_grad()
def limited(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.renorm_(2, 0, 0.5)


def filled(linear: nn.Linear, mask: Tensor) -> None:
    nn.init.constant_(linear.bias, 0.25)


def normalised(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data = F.normalize(linear.weight.data, dim=1)


def drawn(linear: nn.Linear, mask: Tensor) -> None:
    nn.init.normal_(linear.bias)


def shrunk(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data.mul_(0.9)


def made_anew(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * mask)


def once(linear: Any, mask: Tensor) -> None:
    if not hasattr(linear, "is_begun"):
        linear.is_begun = True
        linear.bias.data.fill_(0.3)


def between(write: Callable[[nn.Linear, Tensor], None], loss: Any = class_loss) -> Job:
    return job_of(partial(Between, write), loss, DATA)


def check(job: Job, plan: str, *, quick: bool = True) -> None:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64, quick=quick)
    assert report is not None
    assert report.passed, str(report)


SETTLED = [clamped_at_once, multiplied, assigned, copied, clamped, normalised, limited, filled]


@pytest.mark.parametrize(
    "plan", few(["dp=2,zero=3", "dp=2", "dp=2,zero=1", "dp=2,zero=2"], 1, pytest.mark.slow)
)
@pytest.mark.parametrize("write", few(SETTLED, 1, pytest.mark.slow))
@pytest.mark.long
def test_what_every_forward_leaves_alike_is_one_device_s(write: Any, plan: str) -> None:
    check(between(write), plan)


REFUSED = [
    (drawn, "b.linear.bias, which is trained, and what is written depends on the batch or on random draws"),
    (shrunk, "b.linear.weight, which is trained, and each forward changes it further"),
    (made_anew, "b.linear.weight, which is trained, and another parameter is put in its place"),
    (once, "b.linear.bias, which is trained, and not every forward writes it alike"),
]


@pytest.mark.parametrize("plan", few(["dp=2", *PLANS[1:]], 1, pytest.mark.slow))
@pytest.mark.parametrize(("write", "why"), REFUSED)
@pytest.mark.long
def test_what_would_not_be_one_device_s_is_refused_with_the_reason(write: Any, why: str, plan: str) -> None:
    with pytest.raises(MeshloomError, match=why):
        check(between(write), plan)

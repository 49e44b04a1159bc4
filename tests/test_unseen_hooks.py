"""Hooks on gradients, backward hooks of modules and hooks on what is saved for backward, which change gradients where no operator shows it: seen
when a loss is read, also where they change nothing in the batches that it is compared with.

All but those of `register_full_backward_hook` were lost without a word: the last batch's gradients were others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.data.samples import first_batches
from meshloom.program.store.captured_loss import CapturedLoss
from tests.opaque_jobs import WIDTH, Net, Readable, data, job_of
from tests.verified import report_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def rarely(gradient: Any) -> Any:
    """Clips what is large, as gradients of the last batch are."""
    if gradient is None or gradient.norm() <= 10:
        return gradient
    return gradient * (10 / gradient.norm())


def all_rarely(gradients: Any) -> Any:
    return tuple(map(rarely, gradients))


def written(x: Tensor) -> None:
    """Changes the gradient in place."""

    def hook(gradient: Tensor) -> None:
        with torch.no_grad():
            gradient.clamp_(-0.5, 0.5)

    if x.requires_grad:
        x.register_hook(hook)


class Part(nn.Module):
    def __init__(self, put: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.linear, self.put = nn.Linear(WIDTH, WIDTH), put

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.put(y)
        return x + y


class GivenHooked(Part):
    """It hooks what it is given, of which more is used elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        self.put(x)
        return torch.tanh(self.linear(x))


class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.first, self.last = part, nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.block = Readable()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x).tanh())
        return self.last(x + self.part(x))


class Saves(Part):
    """What it saves for backward is clipped."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda each: each.clamp(-9, 9), lambda each: each):
            return x + torch.tanh(self.linear(x)) ** 2


class SavesOfOthers(Net):
    """What the modules that it calls save is clipped."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda each: each.clamp(-9, 9), lambda each: each):
            return super().forward(x)


class Hooked(Readable):
    """Of another class than the blocks around it, which would be leaves like it."""


def hooked_module(register: str) -> nn.Module:
    part = Hooked()
    hook = (lambda module, taken: all_rarely(taken)) if "pre" in register else (lambda module, given, taken: all_rarely(given))  # fmt: skip
    getattr(part, register)(hook)
    return Net([part])


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum(-1).mean()


def last_batch_larger() -> list[dict[str, Tensor]]:
    return [{**each, "x": each["x"] * (1000 if row >= 16 else 1)} for row, each in enumerate(data())]


def large(model: Callable[[], nn.Module], loss: Any = loss) -> Job:
    return replace(job_of(model, loss=loss), data=last_batch_larger, shuffle=False)


# job, the leaf
FOUND: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "full backward hook": (lambda: hooked_module("register_full_backward_hook"), "parts.0"),
    "saved tensors": (lambda: Net([Saves(written)]), "parts.0"),
    "in place": (lambda: Net([Part(written), Readable()]), "parts.0"),
    "full backward pre-hook": (lambda: hooked_module("register_full_backward_pre_hook"), "parts.0"),
    "backward hook of old": (lambda: hooked_module("register_backward_hook"), "parts.0"),
}  # fmt: skip


def opaque(job: Job) -> list[str]:
    return list(CapturedLoss(job).capture(first_batches(job, 2, 8)).opaque)


def equal(job: Job, plan: str) -> bool:
    report = report_on(job, plan, steps=3)
    return report.passed


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.slow
def test_the_module_of_a_hook_that_no_program_has_is_a_leaf(name: str) -> None:
    model, part = FOUND[name]
    assert opaque(large(model)) == [part]
    assert equal(large(model), "tp=2")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: Residual(GivenHooked(written)), "it hooks the gradient of what it is given"),
        (lambda: SavesOfOthers([Readable(), Readable()]), "Hooks change the tensors that are saved for backward at .*@ml.leaf"),
    ],
    ids=["given", "saved"],
)  # fmt: skip
def test_one_that_sees_more_than_its_module_is_refused(model: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(CaptureError, match=sentence):
        opaque(large(model))

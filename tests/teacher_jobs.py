"""Losses that write parameters which no gradient trains: teachers that follow their students."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.buffer_rules import BufferRule, ema
from meshloom.core.job import Job
from tests.jobs import vectors

Update = Callable[[nn.Module, nn.Module], None]


class Network(nn.Module):
    """Two layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Pair(nn.Module):
    """A student and its teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


@torch.no_grad()
def in_place(teacher: nn.Module, student: nn.Module) -> None:
    for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
        p.mul_(0.9).add_(q, alpha=0.1)


def in_data(teacher: nn.Module, student: nn.Module) -> None:
    for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)


def new_data(teacher: nn.Module, student: nn.Module) -> None:
    for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
        p.data = p.data * 0.9 + q.data * 0.1


@torch.no_grad()
def copied(teacher: nn.Module, student: nn.Module) -> None:
    for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
        p.copy_(q)


UPDATES: dict[str, Update] = {
    "in place": in_place,
    "in data": in_data,
    "new data": new_data,
    "copied": copied,
}


def _distance(student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    return (
        F.cross_entropy(student, y) + (student.log_softmax(1) - teacher.detach().softmax(1)).square().mean()
    )


def updated_first(update: Update) -> Any:
    """As BYOL and MoCo have it: the teacher moves, then it is read."""

    def loss(model: Any, batch: Any) -> Tensor:
        update(model.teacher, model.student)
        with torch.no_grad():
            wanted = model.teacher(batch["x"])
        return _distance(model.student(batch["x"]), wanted, batch["y"])

    return loss


def updated_last(update: Update) -> Any:
    """As DINO and mean teachers have it: after the loss."""

    def loss(model: Any, batch: Any) -> Tensor:
        found = model.student(batch["x"])
        result = _distance(found, model.teacher(batch["x"] + 0.1), batch["y"])
        update(model.teacher, model.student)
        return result

    return loss


class InForward(Pair):
    """The update is the model's own, in training only."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            in_place(self.teacher, self.student)
        return self.student(x), self.teacher(x)


def in_forward(model: Any, batch: Any) -> Tensor:
    return _distance(*model(batch["x"]), batch["y"])


def teacher_job(loss: Any, model: Any = Pair, **settings: Any) -> Job:
    return Job(
        **{
            "model": model,
            "loss": loss,
            "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.5),
            "data": vectors,
            "batch_size": 6,
            "steps": 3,
            "buffers": {"teacher.*": ema(0.9)},
            **settings,
        }
    )


def rules(update: Update) -> dict[str, BufferRule]:
    """Of the teacher that the update moves."""
    return {"teacher.*": "last" if update is copied else ema(0.9)}


JOBS: dict[str, Callable[[], Job]] = {
    **{f"first, {name}": (lambda update=each: teacher_job(updated_first(update), buffers=rules(update))) for name, each in UPDATES.items()},
    **{f"last, {name}": (lambda update=each: teacher_job(updated_last(update), buffers=rules(update))) for name, each in UPDATES.items()},
    "in the forward": lambda: teacher_job(in_forward, InForward),
}  # fmt: skip

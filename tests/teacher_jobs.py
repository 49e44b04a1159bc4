"""Losses that write parameters which no gradient trains: teachers that follow their students."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom
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
def lerp(teacher: nn.Module, student: nn.Module) -> None:
    for name, value in teacher.state_dict().items():
        value.copy_(torch.lerp(value, student.state_dict()[name], 0.1))


@torch.no_grad()
def foreach(teacher: nn.Module, student: nn.Module) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


@torch.no_grad()
def copied(teacher: nn.Module, student: nn.Module) -> None:
    for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
        p.copy_(q)


UPDATES: dict[str, Update] = {
    "in place": in_place, "in data": in_data, "new data": new_data, "lerp": lerp, "foreach": foreach, "copied": copied,
}  # fmt: skip


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
            **settings,
        }
    )


JOBS: dict[str, Callable[[], Job]] = {
    **{f"first, {name}": (lambda update=each: teacher_job(updated_first(update))) for name, each in UPDATES.items()},
    **{f"last, {name}": (lambda update=each: teacher_job(updated_last(update))) for name, each in UPDATES.items()},
    "in the forward": lambda: teacher_job(in_forward, InForward),
}  # fmt: skip


# --- As they are published, with batch norm, queues and centres.


def _encoder(outputs: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, outputs))


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = _encoder(), nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                new_data(self.target, self.online)
        views = x, x.flip(1)
        with torch.no_grad():
            wanted = [self.target(each) for each in views]
        found = [self.predictor(self.online(each)) for each in views]
        pairs = zip(found, reversed(wanted), strict=True)
        return torch.stack([2 - 2 * F.cosine_similarity(*pair, dim=-1).mean() for pair in pairs]).sum()


class Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 6))


def dino(model: Any, batch: Any) -> Tensor:
    s, t = model.student(batch["x"]), model.teacher(batch["x"] + 0.1)
    wanted = F.softmax((t - model.center) / 0.4, -1).detach()
    loss = -(wanted * F.log_softmax(s / 0.5, -1)).sum(-1).mean()
    with torch.no_grad():
        model.center.mul_(0.9).add_(t.mean(0, keepdim=True), alpha=0.1)
        for q, k in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
            k.data.mul_(0.996).add_((1 - 0.996) * q.detach().data)
    return loss


class Moco(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 13), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(x), dim=1)
        with torch.no_grad():
            new_data(self.encoder_k, self.encoder_q)
            k = F.normalize(self.encoder_k(x + 0.1), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.5
        with torch.no_grad():
            at = (self.queue_ptr + torch.arange(len(k))) % 13
            self.queue.index_copy_(1, at, k.T)
            self.queue_ptr.copy_((self.queue_ptr + len(k)) % 13)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


class MeanTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = _encoder()
        self.ema = copy.deepcopy(self.student).requires_grad_(False)


def mean_teacher(model: Any, batch: Any) -> Tensor:
    """The teacher follows more slowly with every step."""
    alpha = min(1 - 1 / (meshloom.step() + 1), 0.9)
    logits = model.student(batch["x"])
    with torch.no_grad():
        wanted = model.ema(batch["x"] + 0.05).softmax(1)
    loss = F.cross_entropy(logits, batch["y"]) + min(1.0, meshloom.step() / 3) * F.mse_loss(
        logits.softmax(1), wanted
    )
    for p, q in zip(model.ema.parameters(), model.student.parameters(), strict=True):
        p.data.mul_(alpha).add_(q.data, alpha=1 - alpha)
    return loss


PUBLISHED: dict[str, Callable[[], Job]] = {
    "byol": lambda: teacher_job(lambda model, batch: model(batch["x"]), Byol, batch_size=15),
    "dino": lambda: teacher_job(dino, Dino, batch_size=15),
    "moco": lambda: teacher_job(lambda model, batch: model(batch["x"]), Moco, batch_size=15),
    "mean teacher": lambda: teacher_job(mean_teacher, MeanTeacher, batch_size=15),
}

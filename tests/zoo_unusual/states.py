"""State that forwards keep: counters, moving averages, codebooks, queues, hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Evaluate, Job
from tests.zoo_unusual import VECTORS, WIDTH, Around, Layer, classes, unusual


class Counted(nn.Module):
    """Anneals by how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("runs", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.linear(x) * (self.runs / 20).clamp(max=1)
        if self.training:
            self.runs += 1
        return out


def counter_that_anneals() -> Job:
    return unusual(lambda: Around(Counted(), Counted()))


class Average(nn.Module):
    """Subtracts the moving average of what it has seen."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.average.clone()
        if self.training:
            self.average.mul_(0.95).add_(x.detach().mean(0), alpha=0.05)
        return out


def average_of_features() -> Job:
    return unusual(lambda: Around(Average(), nn.Linear(WIDTH, WIDTH)))


def average_that_is_not_saved() -> Job:
    class Unsaved(Average):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH), persistent=False)

    return unusual(lambda: Around(Unsaved(), nn.Linear(WIDTH, WIDTH)))


class Codebook(nn.Module):
    """Nearest codes, which follow what chooses them (van den Oord et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(6))
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot((x.detach()[:, None] - self.codes).square().sum(-1).argmin(1), 4).to(x.dtype)
        out = x + (chosen @ self.codes - x).detach()
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ x, alpha=0.1)
                self.codes.copy_(self.sums / (self.sizes[:, None] + 1e-5))
        return out


def codebook() -> Job:
    return unusual(lambda: Around(Codebook(), nn.Linear(WIDTH, WIDTH)))


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(11, WIDTH))
        self.register_buffer("next", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = x + 0.1 * self.rows.clone().mean(0)
        if self.training:
            with torch.no_grad():
                at = (self.next + torch.arange(len(x))) % 11
                self.rows.index_copy_(0, at, x)
                self.next.copy_((self.next + len(x)) % 11)
        return out


def queue_of_rows() -> Job:
    return unusual(lambda: Around(Queue(), nn.Linear(WIDTH, WIDTH)))


class Taught(nn.Module):
    """A student and a teacher, which is a moving average of it and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Around(Layer(0.0)), Around(Layer(0.0))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
        return self.student(x), self.teacher(x).detach()


def teacher_that_follows() -> Job:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found, taught = model(batch["x"])
        return F.cross_entropy(found, batch["y"]) + F.mse_loss(found, taught)

    return unusual(Taught, loss)


def counter_in_python() -> Job:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    return unusual(lambda: Around(Counts(), Layer()))


def metrics_of_sums() -> Job:
    def right(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (model(batch["x"]).argmax(1) == batch["y"]).sum(), torch.tensor(len(batch["y"]))

    rows = [{name: each[row] for name, each in VECTORS.items()} for row in range(13)]
    evaluate = Evaluate(
        data=lambda: rows, metrics={"loss": classes, "right": right}, every=5, best="right:max"
    )
    return unusual(lambda: Around(Layer(), nn.BatchNorm1d(WIDTH)), evaluate=evaluate)


def average_of_parameters() -> Job:
    rows = [{name: each[row] for name, each in VECTORS.items()} for row in range(11)]
    evaluate = Evaluate(data=lambda: rows, metrics={"loss": classes}, every=4)
    return unusual(lambda: Around(Layer(), nn.BatchNorm1d(WIDTH)), evaluate=evaluate, average=0.9)

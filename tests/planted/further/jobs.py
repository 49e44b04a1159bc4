"""Jobs that more bugs are planted in: two layers of odd sizes, a GPT of 193 tokens, convolutions without statistics, state in attributes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job import _given_by_losses
from tests.jobs import GPT, Samples, images, make_job, texts, token_loss
from tests.planted.models import MORE_MODELS

LENGTH = 193


class Two(nn.Module):
    """[batch, 7] -> [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.head = nn.Linear(13, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x)))


class Long(GPT):
    """Of 193 tokens."""

    def __init__(self) -> None:
        super().__init__(width=9)
        self.position = nn.Embedding(LENGTH, 9)


class Convolutions(nn.Module):
    """[batch, 1, 6, 6] -> [batch, 5]; dropout, no statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.down = nn.Conv2d(3, 7, 3, stride=2)
        self.norm = nn.GroupNorm(1, 7)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.down(F.gelu(self.conv(x)))))
        return self.head(self.dropout(x.mean((2, 3))))


class Skip(nn.Module):
    """[batch, 7] -> [batch, 5]; the first layer's result is used by three others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = torch.tanh(self.second(x))
        return self.head(torch.tanh(self.third(x + y)) + x)


class Recurrent(nn.Module):
    """[batch, 7] -> [batch, 5]; goes on with the state that the batch before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(7, 9), nn.Linear(9, 5)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.hidden if self.training else None
        if before is None or len(before) != len(x):
            before = x.new_zeros(len(x), 9)
        now = self.cell(x, before)
        if self.training:
            self.hidden = now.detach()
        return self.head(now)


class Counting(nn.Module):
    """[batch, 7] -> [batch, 5]; its temperature falls with the number of steps that it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 9), nn.Linear(9, 5)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * (1 + 0.1 * self.count)
        if self.training:
            self.count += 1
        return self.head(x)


class Noisy(nn.Module):
    """[batch, 7] -> [batch, 5]; adds noise, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x + 0.1 * torch.randn_like(x))


class Skipping(nn.Module):
    """[batch, 7] -> [batch, 5]; leaves out a layer now and then, as Python draws it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        strength = random.random() if self.training else 0.5
        return self.head(x + strength * torch.tanh(self.second(x)))


class OwnDraws(nn.Module):
    """[batch, 7] -> [batch, 5]; noise of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 9), nn.Linear(9, 5)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype) if self.training else 0
        return self.head(x + 0.1 * noise)


class FrozenNorm(nn.Module):
    """[batch, 7] -> [batch, 5]; the statistics of its norm stay as they were loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)
        self.train()
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


class Histogram(nn.Module):
    """[batch, 7] -> [batch, 5]; counts the largest feature of each sample, and keeps the norm of the last batch."""

    counts: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 9), nn.Linear(9, 5)
        self.register_buffer("counts", torch.zeros(9))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            with torch.no_grad():
                self.counts.add_(F.one_hot(x.argmax(1), 9).sum(0))
                self.largest.mul_(0.5).add_(x.square().mean(), alpha=0.5)
        return self.head(x)


class Table(nn.Module):
    """Tokens [batch, 7] -> [batch, 5]; few rows of its table have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(101, 6, sparse=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x).mean(1)))


class Duel(nn.Module):
    """[batch, 7]; a generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 7))
        self.critic = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))

    def fake(self, like: Tensor) -> Tensor:
        return self.generator(torch.randn(len(like), 3, dtype=like.dtype))


class Told(torch.utils.data.Dataset[Any]):
    """Vectors that are scaled by the number of the epoch."""

    epoch = 0

    def __init__(self) -> None:
        self._samples = make_job("mlp", "adamw").data()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        return {**sample, "x": sample["x"] * (1 + self.epoch)}


def long_texts() -> Samples:
    """x [193] tokens of 29, y the next ones, -100 behind the end of the text; lengths 40 to 193."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(29, (30, LENGTH + 1), generator=generator)
    lengths = torch.randint(40, LENGTH + 1, (30, 1), generator=generator)
    return Samples(x=tokens[:, :-1], y=tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100))


def words() -> Samples:
    """x [7] tokens of 101, y a class of 5."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(101, (30, 7), generator=generator)
    return Samples(x=x, y=torch.randint(5, (30,), generator=generator))


def logging_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logs the share of right answers."""
    scores = model(batch["x"])
    ml.log("accuracy", (scores.argmax(1) == batch["y"]).float().mean())
    return F.cross_entropy(scores, batch["y"])


def mixed(batch: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mixup of inputs."""
    return {"x": 0.7 * batch["x"] + 0.3 * others["x"], "y": batch["y"]}


def critic_loss(model: Duel, batch: dict[str, Tensor]) -> Tensor:
    return model.critic(model.fake(batch["x"]).detach()).mean() - model.critic(batch["x"]).mean()


def generator_loss(model: Duel, batch: dict[str, Tensor]) -> Tensor:
    return -model.critic(model.fake(batch["x"])).mean()


def _sparse(named: Any) -> list[torch.optim.Optimizer]:
    rest = [each for each in named if each[0] != "table.weight"]
    table = [each for each in named if each[0] == "table.weight"]
    return [torch.optim.SparseAdam(table, lr=1e-2), torch.optim.AdamW(rest, lr=3e-3)]


def _several() -> dict[str, ml.Objective]:
    adam = lambda named: torch.optim.Adam(named, lr=3e-3)  # noqa: E731
    return {
        "critic": ml.Objective(loss=critic_loss, optimizer=adam, parameters="critic", updates=2),
        "generator": ml.Objective(loss=generator_loss, optimizer=adam, parameters="generator", every=2),
    }


MORE_MODELS |= {
    "two": {"model": Two},
    "long": {"model": Long, "data": long_texts, "loss": token_loss},
    "convolutions": {"model": Convolutions, "data": images},
    "skip": {"model": Skip},
    "recurrent": {"model": Recurrent, "drop_last": True},
    "counting": {"model": Counting},
    "noisy": {"model": Noisy},
    "skipping": {"model": Skipping},
    "owndraws": {"model": OwnDraws},
    "frozennorm": {"model": FrozenNorm},
    "histogram": {"model": Histogram},
    "table": {"model": Table, "data": words, "optimizer": _sparse, "scheduler": None},
    "told": {"data": Told},
    "logging": {"model": Two, "loss": logging_loss},
    "mixed": {"mix": mixed},
    "growing": {"batch_sizes": {0: 7, 2: 13}},
    "thawed": {"frozen": {"first": range(1)}},
    "opaque": {"opaque": ["second"]},
    "texts": {"model": GPT, "data": texts, "loss": token_loss},
    "lbfgs": {
        "optimizer": lambda named: torch.optim.LBFGS([each for _, each in named], lr=0.5, max_iter=3),
        "scheduler": None,
        "clip_grad_norm": None,
    },
    "duel": {
        "model": Duel,
        "losses": _several(),
        "loss": _given_by_losses,
        "optimizer": _given_by_losses,
        "scheduler": None,
    },
}

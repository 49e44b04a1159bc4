"""Six jobs whose arithmetic is exact: small whole numbers, Linear, ReLU, embedding, squared loss, SGD with rates that are powers of two.

No sum rounds, so any order of sums, on any machine, under any plan, gives the same bits; `exactness.py` proves it of each operator. A step multiplies what
a weight is a multiple of, so the deeper models take two or three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshloom as ml

BATCH = 8


def whole_numbers(*shape: int, least: int, most: int, factor: int) -> Tensor:
    """Whole numbers from `least` to `most` in a pattern of their own; nothing is drawn."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * factor % 31 % (most - least + 1) + least).reshape(shape).double()


def with_whole_weights(model: nn.Module) -> nn.Module:
    """Weights of -1, 0 and 1, a third of them not 0, in a pattern for each parameter."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            pattern = whole_numbers(*parameter.shape, least=0, most=30, factor=7 + 2 * number)
            parameter.copy_((pattern < 5).double() - (pattern > 25).double())
    return model


def squares(out: Tensor, target: Tensor) -> Tensor:
    difference = out - target
    return (difference * difference).sum()


def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Squared differences, summed, and the number of samples."""
    x, y = batch
    return squares(model(x), y), len(x)


def loss_mean(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The mean over samples, of which a chunk has 1, 2, 4 or 8."""
    x, y = batch
    return squares(model(x), y) / len(x)


def loss_of_words(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Of the words that count, which are half of them all."""
    words, targets, counts = batch
    return squares(model(words) * counts[..., None], targets * counts[..., None]), counts.sum()


def vectors(width: int, outputs: int, dtype: torch.dtype, batches: int) -> Callable[[], TensorDataset]:
    def data() -> TensorDataset:
        x = whole_numbers(BATCH * batches, width, least=-1, most=1, factor=5)
        y = whole_numbers(BATCH * batches, outputs, least=-2, most=2, factor=3)
        return TensorDataset(x.to(dtype), y.to(dtype))

    return data


def words(vocabulary: int, width: int, dtype: torch.dtype, *, masked: bool) -> Callable[[], TensorDataset]:
    def data() -> TensorDataset:
        tokens = whole_numbers(BATCH * 4, 4, least=0, most=vocabulary - 1, factor=11).long()
        targets = whole_numbers(BATCH * 4, 4, width, least=-1, most=1, factor=3).to(dtype)
        counts = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=dtype).expand(BATCH * 4, 4)
        return TensorDataset(tokens, targets, *([counts] if masked else []))

    return data


class Skips(nn.Module):
    """[batch, 8] -> [batch, 8]; one layer is used twice, and each use is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.relu(self.layer(x))
        return x


class Tied(nn.Module):
    """Words [batch, length] -> [batch, length, vocabulary], by the embedding's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.embed(x))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 8), nn.ReLU(), nn.Linear(8, 4))


def partly_frozen() -> nn.Module:
    """The layers after the first stay as they are, so that a step adds as many digits as the one before."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    for parameter in (*model[2].parameters(), *model[4].parameters()):
        parameter.requires_grad_(False)
    return model


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


Named = list[tuple[str, nn.Parameter]]


def sgd(**settings: Any) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD(named, **settings)


def by_groups(named: Named) -> torch.optim.Optimizer:
    """Two rates, and decay for the matrices."""
    matrices, vectors = ([pair for pair in named if (pair[1].ndim > 1) == which] for which in (True, False))
    return torch.optim.SGD(
        [{"params": matrices, "weight_decay": 2**-2}, {"params": vectors, "lr": 2**-3}], lr=2**-4
    )


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _job(
    model: Callable[[], nn.Module],
    dtype: torch.dtype,
    loss: Any,
    optimizer: Any,
    data: Any,
    steps: int,
    **more: Any,
) -> ml.Job:
    return ml.Job(
        model=lambda: with_whole_weights(model()).to(dtype), loss=loss, optimizer=optimizer, data=data, batch_size=BATCH, steps=steps, checkpoint_every=1,
        keep_checkpoints=steps, **more,
    )  # fmt: skip


SINGLE, DOUBLE = torch.float32, torch.float64
JOBS: Mapping[str, ml.Job] = {
    # three layers, all trained; samples in a random order
    "mlp": _job(mlp, DOUBLE, loss_sum, sgd(lr=2**-4), vectors(8, 4, DOUBLE, 4), 2),
    # a table of which a batch uses some rows; half of the words count; momentum
    "embedded": _job(embedded, SINGLE, loss_of_words, sgd(lr=2**-1, momentum=0.5), words(12, 4, SINGLE, masked=True), 2),
    # one parameter at both ends
    "tied": _job(Tied, DOUBLE, loss_sum, sgd(lr=2**-4), words(16, 16, DOUBLE, masked=False), 2),
    # residuals, and a layer that is used twice
    "skips": _job(Skips, DOUBLE, loss_sum, sgd(lr=2**-4), vectors(8, 8, DOUBLE, 4), 2, shuffle=False),
    # frozen layers above the trained one; Nesterov's momentum, decay, a rate that is halved; the second epoch
    "frozen": _job(
        partly_frozen, DOUBLE, loss_sum, sgd(lr=2**-3, momentum=0.5, nesterov=True, weight_decay=2**-2), vectors(8, 4, DOUBLE, 2), 4, scheduler=halving
    ),
    # two groups of parameters; a mean
    "groups": _job(two_layers, DOUBLE, loss_mean, by_groups, vectors(8, 4, DOUBLE, 4), 2),
}  # fmt: skip

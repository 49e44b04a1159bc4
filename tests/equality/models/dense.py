"""Dense models: plain, tied, with skips, with norms, with dropout, with several heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, normal, whole


class MLP(nn.Module):
    """[batch, 7] -> [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 13)
        self.third = nn.Linear(13, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(F.gelu(self.third(x)))


class Square(nn.Module):
    """[4, 4] -> [4, 4]: batch, width and classes are all 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Skips(nn.Module):
    """[batch, 9] -> [batch, 5]: residuals, and a skip from the first layer to the last as in a U."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(9, 10)
        self.down = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
        self.up = nn.ModuleList([nn.Linear(20, 10), nn.Linear(20, 10)])
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = x = F.gelu(self.enter(x))
        held = []
        for layer in self.down:
            x = x + F.gelu(layer(x))
            held.append(x)
        for layer in self.up:
            x = x + F.gelu(layer(torch.cat([x, held.pop()], dim=-1)))
        return self.head(torch.cat([x, first], dim=-1))


class TiedAutoencoder(nn.Module):
    """[batch, 12] -> [batch, 12]: the decoder's weights are the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(12, 7)
        self.inner = nn.Linear(7, 5)
        self.inner_bias = nn.Parameter(torch.zeros(7))
        self.outer_bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.inner(torch.tanh(self.outer(x))))
        back = torch.tanh(F.linear(code, self.inner.weight.t(), self.inner_bias))
        return F.linear(back, self.outer.weight.t(), self.outer_bias)


class Reused(nn.Module):
    """[batch, 6] -> [batch, 6]: one block is used three times, one is never used, and one parameter is in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6, bias=False)
        self.unused = nn.Linear(6, 3)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.other.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.block(x))
        return self.head(torch.sigmoid(self.other(x)))


class RMSNorm(nn.Module):
    """[..., width] -> the same, written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Norms(nn.Module):
    """[batch, 9] -> [batch, 5]: layer norm, RMS norm, group norm, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 12)
        self.layer_norm = nn.LayerNorm(12)
        self.second = nn.Linear(12, 12)
        self.rms = RMSNorm(12)
        self.third = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.group_norm = nn.GroupNorm(3, 12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(F.silu(self.first(x)))
        x = self.rms(x + F.silu(self.second(x)))
        return self.head(self.group_norm(x + F.silu(self.third(x))))


class Dropped(nn.Module):
    """[batch, 8] -> [batch, 5]: dropout of elements, of whole branches of a sample, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 14)
        self.branch = nn.Linear(14, 14)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.first(x + 0.1 * torch.randn_like(x))))
        kept = torch.bernoulli(torch.full((x.shape[0], 1), 0.8, dtype=x.dtype)) / 0.8
        x = x + kept * torch.tanh(self.branch(x))
        return self.head(F.dropout(x, 0.1, self.training))


class BatchNormed(nn.Module):
    """[batch, 7] -> [batch, 5]: batch statistics of vectors, one norm without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 10, bias=False)
        self.plain_norm = nn.BatchNorm1d(10, affine=False, momentum=None)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.head(torch.tanh(self.plain_norm(self.second(x))))


class Mixer(nn.Module):
    """[batch, 6, 6] -> [batch, 5]: mixes along tokens, then along channels, of which there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(4))
        self.tokens = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 15), nn.GELU(), nn.Linear(15, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for number, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * number](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * number + 1](x))
        return self.head(x.mean(dim=1))


class Tasks(nn.Module):
    """[batch, 8] -> three losses of one trunk, weighted by learned scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 13), nn.SiLU(), nn.Linear(13, 13), nn.SiLU())
        self.classes = nn.Linear(13, 5)
        self.number = nn.Linear(13, 1)
        self.marks = nn.Linear(13, 3)
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.trunk(batch["x"])
        losses = torch.stack(
            [
                F.cross_entropy(self.classes(x), batch["y"]),
                F.smooth_l1_loss(self.number(x).squeeze(-1), batch["number"]),
                F.binary_cross_entropy_with_logits(self.marks(x), batch["marks"]),
            ]
        )
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


class Hyper(nn.Module):
    """[batch, 6] -> [batch, 4]: a network gives each sample the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.context = nn.Linear(3, 8)
        self.weights = nn.Linear(8, 6 * 7)
        self.biases = nn.Linear(8, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        context = torch.tanh(self.context(context))
        weights = self.weights(context).view(-1, 6, 7)
        return self.head(torch.tanh(torch.bmm(x.unsqueeze(1), weights).squeeze(1) + self.biases(context)))


class Monotone(nn.Module):
    """[batch, 7] -> [batch, 3]: parameters of no dimensions, used as bounds and scales, and a gate by comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.slope = nn.Parameter(torch.tensor(0.3))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(9, 11)
        self.prelu = nn.PReLU(11)
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.where(x > 0.1, x, self.slope * x)
        return self.head(self.prelu(self.second(x).clamp(-3.0, 3.0))) / self.temperature.abs()


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean over the samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def restore(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean over samples and elements."""
    return F.mse_loss(model(batch["x"]), batch["x"])


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The model computes it."""
    return model(batch)


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean by the samples' own weights."""
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none", label_smoothing=0.1)
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def by_context(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["context"]), batch["target"])


def vectors(width: int, classes: int, seed: int = 1, weight: bool = False) -> Any:
    """x [width] normal, y a class; with weights from 0.5 to 2.5."""

    def build(count: int) -> Samples:
        fields = {"x": normal(seed, count, width), "y": whole(seed + 100, classes, count)}
        if weight:
            fields["weight"] = 0.5 + 2 * torch.sigmoid(normal(seed + 200, count))
        return Samples(**fields)

    return build


def tasks(count: int) -> Samples:
    return Samples(
        x=normal(5, count, 8),
        y=whole(6, 5, count),
        number=normal(7, count),
        marks=whole(8, 2, count, 3).float(),
    )


def contexts(count: int) -> Samples:
    return Samples(x=normal(9, count, 6), context=normal(10, count, 3), target=normal(11, count, 4))


def grids(count: int) -> Samples:
    return Samples(x=normal(12, count, 6, 6), y=whole(13, 5, count))


def coded(count: int) -> Samples:
    return Samples(x=normal(14, count, 12))


DENSE = [
    Model(
        name="mlp",
        features="dense",
        build=MLP,
        loss=classify,
        samples=vectors(7, 5),
        cut="third",
        pins="second:column+third:row",
    ),
    Model(
        name="square",
        features="sizes equal by accident",
        build=Square,
        loss=classify,
        samples=vectors(4, 4),
        chunk=4,
        cut="layers.4",
        pins="layers.2:row",
    ),
    Model(
        name="skips",
        features="skips across stages",
        build=Skips,
        loss=classify,
        samples=vectors(9, 5),
        cut="up.0",
    ),
    Model(
        name="tied_autoencoder",
        features="tied, transposed",
        build=TiedAutoencoder,
        loss=restore,
        samples=coded,
        stages=2,
    ),
    Model(
        name="reused",
        features="tied, used thrice, unused",
        build=Reused,
        loss=classify,
        samples=vectors(6, 6),
        chunk=2,
        stages=2,
    ),
    Model(
        name="norms",
        features="norms, weight norm",
        build=Norms,
        loss=weighted,
        samples=vectors(9, 5, weight=True),
        chunk=2,
        cut="third",
    ),
    Model(
        name="dropped",
        interacts=True,
        features="dropout, noise",
        build=Dropped,
        loss=classify,
        samples=vectors(8, 5),
        stages=2,
        pins="first:column",
    ),
    Model(
        name="batch_normed",
        interacts=True,
        features="batch statistics",
        build=BatchNormed,
        loss=classify,
        samples=vectors(7, 5),
        norms=True,
        several=True,
        cut="second",
        leaves=("plain_norm",),  # its mean over all batches divides by a number that it counts
    ),
    Model(
        name="mixer",
        features="transposes, tokens as many as channels",
        build=Mixer,
        loss=classify,
        samples=grids,
        chunk=2,
        cut="channels.0",
    ),
    Model(
        name="tasks",
        features="several losses of one sum, scalars",
        build=Tasks,
        loss=own_loss,
        samples=tasks,
        stages=2,
    ),
    Model(
        name="hyper",
        features="weights by a network",
        build=Hyper,
        loss=by_context,
        samples=contexts,
        stages=2,
    ),
    Model(
        name="monotone",
        features="parameters of no dimensions",
        build=Monotone,
        loss=classify,
        samples=vectors(7, 3, seed=15),
        cut="second",
    ),
]

"""Parts in other precisions, parts that are frozen, shared, unused, or used now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from meshloom.core.job import Job
from tests.zoo import adam, integers, normal
from tests.zoo_unusual import (
    CLASSES,
    PICTURES,
    TEXTS,
    VECTORS,
    WIDTH,
    Around,
    Layer,
    classes,
    tokens,
    unusual,
)


class Rounded(nn.Module):
    """Computes in bfloat16 with parameters in the precision around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight.bfloat16(), self.linear.bias.bfloat16()
        return x + F.linear(x.bfloat16(), weight, bias).to(x.dtype)


def bfloat16_inside() -> Job:
    return unusual(lambda: Around(Rounded(), nn.Linear(WIDTH, WIDTH)))


class Held(nn.Module):
    """Has its parameters in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


def parameters_in_bfloat16() -> Job:
    return unusual(lambda: Around(Held(), nn.Linear(WIDTH, WIDTH)))


class Exact(nn.Module):
    """Normalizes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        return ((wide - wide.mean(-1, keepdim=True)) / wide.std(-1, keepdim=True) * self.scale).to(x.dtype)


def float64_inside() -> Job:
    return unusual(lambda: Around(Exact(), nn.Linear(WIDTH, WIDTH)))


def autocast_of_the_users() -> Job:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch["x"])
        return F.cross_entropy(out.to(batch["x"].dtype), batch["y"])

    return unusual(lambda: Around(Layer()), loss)


def trunk_that_thaws() -> Job:
    return unusual(lambda: Around(Layer(), Layer()), frozen={"into": range(2), "inside.0": range(1, 5)})


def head_that_freezes() -> Job:
    return unusual(lambda: Around(Layer()), frozen={"out": range(1, 12)})


def frozen_for_good() -> Job:
    def build() -> nn.Module:
        model = Around(Layer(), Layer())
        model.into.requires_grad_(False)
        model.inside[0].requires_grad_(False)
        return model

    return unusual(build)


def frozen_statistics() -> Job:
    def build() -> nn.Module:
        model = Around(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).train()
        model.inside[0].eval()
        return model

    return unusual(build)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).relu()


def parameters_that_are_not_used() -> Job:
    return unusual(lambda: Around(Spare(), Layer()))


class Paths(nn.Module):
    """One of two layers, by the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0.9, self.one(x), self.two(x)).tanh()


def layer_that_few_samples_use() -> Job:
    return unusual(lambda: Around(Paths(), Layer()))


def one_layer_three_times() -> Job:
    def build() -> nn.Module:
        layer = Layer()
        return Around(layer, nn.Tanh(), layer, layer)

    return unusual(build)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, WIDTH, padding_idx=0)
        self.body = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, 23)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.table(x)))


def tied_and_padded() -> Job:
    return unusual(Tied, tokens, TEXTS)


def transposed_and_tied() -> Job:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 7) / 3), nn.Parameter(torch.zeros(7))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight).tanh(), self.weight.T, self.bias)

    return unusual(Autoencoder, lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"]))


def limited_rows() -> Job:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(23, WIDTH, max_norm=0.8), nn.Linear(WIDTH, 23)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).cumsum(1))

    return unusual(Rows, tokens, TEXTS)


def weight_norms() -> Job:
    return unusual(
        lambda: Around(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), orthogonal(nn.Linear(WIDTH, WIDTH)))
    )


def spectral_norms() -> Job:
    return unusual(
        lambda: Around(spectral_norm(nn.Linear(WIDTH, 11)), nn.ReLU(), spectral_norm(nn.Linear(11, WIDTH)))
    )


def recurrent_layers_with_dropout() -> Job:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(23, WIDTH), nn.Linear(22, 23)
            self.layers = nn.LSTM(WIDTH, 11, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.table(x))[0])

    return unusual(Recurrent, tokens, TEXTS)


def statistics_of_pictures() -> Job:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Conv2d(6, 9, 3, stride=2, groups=3),
            nn.BatchNorm2d(9, affine=False), nn.SiLU(), nn.InstanceNorm2d(9, affine=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, CLASSES),
        )  # fmt: skip

    return unusual(build, data=PICTURES)


def norms_without_running_statistics() -> Job:
    return unusual(lambda: Around(nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Linear(WIDTH, WIDTH)))


def losses_of_two_tasks() -> Job:
    class Weighed(Around):
        def __init__(self) -> None:
            super().__init__(Layer())
            self.other, self.variances = nn.Linear(WIDTH, 1), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.inside(self.into(x).tanh())
            return self.out(h), self.other(h).squeeze(1)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found, number = model(batch["x"])
        both = torch.stack([F.cross_entropy(found, batch["y"]), F.smooth_l1_loss(number, batch["z"])])
        return (both * (-model.variances).exp() + model.variances).sum()

    return unusual(Weighed, loss, {**VECTORS, "z": normal(908)})


def penalty_of_gradients() -> Job:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        found = F.cross_entropy(model(x), batch["y"])
        (slope,) = torch.autograd.grad(found, x, create_graph=True)
        return found + slope.square().sum(1).mean()

    return unusual(lambda: Around(Layer()), loss)


def penalty_of_parameters() -> Job:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return classes(model, batch) + 1e-3 * sum(each.abs().sum() for each in model.parameters())

    return unusual(lambda: Around(Layer()), loss)


def rows_without_targets() -> Job:
    targets = torch.where(integers(909, 3, 7) == 0, TEXTS["y"], -100)

    def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = model(batch["x"]).transpose(1, 2)
        return F.cross_entropy(out, batch["y"], reduction="sum"), (batch["y"] != -100).sum()

    return unusual(Tied, loss, {**TEXTS, "y": targets}, optimizer=adam)

"""Numbers that are infinite, none, huge, tiny, or of another kind."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers
from tests.zoo_unusual import CLASSES, TEXTS, VECTORS, WIDTH, Around, Layer, tokens, unusual


class Attention(nn.Module):
    """[batch, 7] tokens -> [batch, 7, 23], causal by what is added to the scores."""

    def __init__(self, hidden: float, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.table, self.place = nn.Embedding(23, 12), nn.Parameter(torch.zeros(7, 12))
        self.qkv, self.merge, self.head = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 23)
        self.register_buffer("mask", torch.full((7, 7), hidden).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.place
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(h).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head(h + self.merge(mixed))


def mask_of_minus_infinity() -> Job:
    return unusual(lambda: Attention(float("-inf")), tokens, TEXTS)


def mask_of_the_least_float() -> Job:
    return unusual(lambda: Attention(torch.finfo(torch.float32).min), tokens, TEXTS)


def mask_of_a_billion() -> Job:
    return unusual(lambda: Attention(-1e9), tokens, TEXTS)


class Unset(nn.Module):
    """Rows of a table that no one reads are not a number."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.linspace(-1, 1, 5 * WIDTH).unflatten(0, (5, WIDTH))
        self.register_buffer("rows", torch.cat([rows, torch.full((2, WIDTH), float("nan"))]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows[(x.detach().abs().sum(1) * 7).long() % 5]


def buffer_with_rows_of_nan() -> Job:
    return unusual(lambda: Around(Unset()))


class Bounds(nn.Module):
    """Values clamped to bounds of which some are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([-0.5, float("-inf")] * 4 + [0.0]))
        self.register_buffer("most", torch.tensor([float("inf"), 0.3, 0.5] * 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.least), self.most)


def bounds_that_are_infinite() -> Job:
    return unusual(lambda: Around(Bounds(), nn.Linear(WIDTH, WIDTH)))


class Highest(nn.Module):
    """Remembers the largest value so far, which begins as minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.full((WIDTH,), float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.highest.copy_(torch.maximum(self.highest, x.detach().amax(0)))
        return x


def highest_value_so_far() -> Job:
    return unusual(lambda: Around(Highest(), nn.Linear(WIDTH, WIDTH)))


class Scaled(Layer):
    def __init__(self, start: float, each: bool = True) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,) if each else (), start))

    def scaled(self, x: Tensor) -> Tensor:
        return self.gamma * x


def layer_scale_of_a_millionth() -> Job:
    return unusual(lambda: Around(Scaled(1e-6), Scaled(1e-6)))


def layer_scale_of_a_billionth() -> Job:
    return unusual(lambda: Around(Scaled(1e-9), Scaled(1e-9)))


def residuals_that_begin_at_zero() -> Job:
    return unusual(lambda: Around(Scaled(0.0, each=False), Scaled(0.0, each=False)))


def head_that_begins_at_zero() -> Job:
    def build() -> nn.Module:
        model = Around(Layer(), Layer())
        nn.init.zeros_(model.out.weight)
        nn.init.zeros_(model.out.bias)
        return model

    return unusual(build)


class Shifted(nn.Module):
    """Logits far from zero, as after a bias of ten thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 1e4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).log()


def values_far_from_zero() -> Job:
    return unusual(lambda: Around(Shifted(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))


def gradients_of_a_millionth() -> Job:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"]) * 1e-6

    return unusual(lambda: Around(Layer()), loss)


def losses_of_a_million() -> Job:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"]) * 1e3, F.one_hot(batch["y"], CLASSES) * 1e3)

    return unusual(lambda: Around(Layer()), loss)


def classes_with_weights_of_zero() -> Job:
    weights = torch.tensor([1.0, 0.0, 3.0, 0.5, 0.0])

    def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(model(batch["x"]), batch["y"], weight=weights.to(batch["x"]), reduction="sum")
        return total, weights.to(batch["x"])[batch["y"]].sum()

    return unusual(lambda: Around(Layer()), loss)


class Temperature(nn.Module):
    """A parameter without dims, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm, self.none = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.logarithm.exp() + self.none.sum()


def parameters_without_dims_and_elements() -> Job:
    return unusual(lambda: Around(Temperature(), nn.Linear(WIDTH, WIDTH)))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        filters = self.filters.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
        return x + torch.fft.irfft(torch.fft.rfft(x) * filters, n=WIDTH)


def complex_parameters() -> Job:
    return unusual(lambda: Around(Spectrum(), Layer()))


class Chosen(nn.Module):
    """Buffers of truth values, of small and of large whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(WIDTH) % 3 != 1)
        self.register_buffer("order", torch.randperm(WIDTH, generator=torch.Generator().manual_seed(4)))
        self.register_buffer("codes", torch.arange(WIDTH, dtype=torch.uint8) * 25, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.kept, x, x[:, self.order] * self.codes / 255)


def buffers_of_whole_numbers() -> Job:
    return unusual(lambda: Around(Chosen(), nn.Linear(WIDTH, WIDTH)))


def samples_that_are_all_alike() -> Job:
    same = {"x": torch.ones(24, 7), "y": integers(907, CLASSES)}
    return unusual(lambda: Around(Layer(), nn.BatchNorm1d(WIDTH)), data=same)


def inputs_that_are_zero() -> Job:
    return unusual(lambda: Around(Layer()), data={**VECTORS, "x": torch.zeros(24, 7)})

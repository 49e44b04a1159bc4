"""Recurrences over time, and models of one's own code: a language model of two LSTM layers, a U-Net, and a
recommendation model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.published.model import Published, from_transformers, published, tokens

WORDS, WIDTH = 33278, 650  # WikiText-2; Zaremba et al., 2014
ROWS, FEATURES = 10_000_000, 64


class Lstm(nn.Module):
    """Two layers over words [samples, tokens] -> scores [samples, tokens, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(F.dropout(self.words(words), 0.5, self.training))[0])


class Twice(nn.Sequential):
    """Two convolutions of 3 x 3, each with a norm over the batch."""

    def __init__(self, given: int, made: int) -> None:
        def one(channels: int) -> list[nn.Module]:
            return [nn.Conv2d(channels, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU()]

        super().__init__(*one(given), *one(made))


class UNet(nn.Module):
    """Pictures [samples, 3, height, width] -> scores [samples, classes, height, width] (Ronneberger et al.,
    2015)."""

    def __init__(self, classes: int = 21, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            Twice(given, made) for given, made in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1])
        )
        self.beside = nn.ModuleList(Twice(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for each in self.down:
            x = each(F.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        skipped.pop()
        for up, beside in zip(self.up, self.beside, strict=True):
            x = beside(torch.cat((skipped.pop(), up(x)), 1))
        return self.head(x)


class Recommender(nn.Module):
    """Eight tables of 10 million rows, 13 numbers; every pair of features is multiplied (Naumov et al.,
    2019)."""

    def __init__(self, num_tables: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, FEATURES, mode="sum") for _ in range(num_tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, FEATURES), nn.ReLU()
        )
        pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(
            nn.Linear(FEATURES + pairs, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """numbers [samples, 13], rows [samples, tables, several] -> [samples]."""
        first = self.bottom(numbers)
        features = torch.stack(
            (first, *(table(rows[:, place]) for place, table in enumerate(self.tables))), 1
        )
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(features.shape[1], features.shape[1], -1)
        return self.top(torch.cat((first, products[:, row, column]), 1)).squeeze(1)


def _next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["input_ids"])
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _parts(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def _clicked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["numbers"], batch["rows"]), batch["clicked"])


def _parts_of_pictures(samples: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.zeros(samples, 3, 256, 256),
        "labels": torch.zeros(samples, 256, 256, dtype=torch.long),
    }


def _shown(samples: int) -> dict[str, Tensor]:
    return {
        "numbers": torch.zeros(samples, 13),
        "rows": torch.zeros(samples, 8, 4, dtype=torch.long),
        "clicked": torch.zeros(samples),
    }


def _mamba(name: str, model: str, settings: dict[str, Any] | None = None) -> Published:
    return from_transformers(
        name,
        "state space",
        "1,024 tokens",
        model,
        tokens(1024),
        settings or {},
        chunk=1,
    )


OWN = [
    _mamba("mamba-130m", "MambaForCausalLM", {"num_hidden_layers": 24}),
    _mamba("mamba2", "Mamba2ForCausalLM"),
    published("lstm", "recurrent", "256 tokens", Lstm, tokens(256), chunk=16, loss=_next_word),
    published("u-net", "segmentation", "256 x 256", UNet, _parts_of_pictures, chunk=4, loss=_parts),
    published(
        "recommender",
        "recommendation",
        "13 numbers, 8 x 4 rows",
        Recommender,
        _shown,
        chunk=2048,
        loss=_clicked,
    ),
]

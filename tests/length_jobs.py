"""A language model whose batches are padded to their longest text, so that almost every step has another
length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from tests.jobs import Block, token_loss

WORDS = 97


class Texts(nn.Module):
    """[batch, tokens] of words -> [batch, tokens, WORDS]."""

    def __init__(
        self, width: int = 32, heads: int = 4, blocks: int = 2, longest: int = 512, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            self.norm(self.blocks(self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))))
        )


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Texts of random words and lengths, drawn for every sample by its number."""

    def __init__(self, num_samples: int, shortest: int, longest: int) -> None:
        self._num_samples, self._shortest, self._longest = num_samples, shortest, longest

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(self._shortest, self._longest + 1, (1,), generator=generator))
        return torch.randint(WORDS, (length + 1,), generator=generator)


def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """The texts [batch, longest of them], and the next words, -100 behind the end of each."""
    length = max(len(each) for each in samples) - 1
    x, y = torch.zeros(len(samples), length, dtype=torch.long), torch.full((len(samples), length), -100)
    for row, each in enumerate(samples):
        x[row, : len(each) - 1], y[row, : len(each) - 1] = each[:-1], each[1:]
    return {"x": x, "y": y}


def lengths_job(
    *, shortest: int = 3, longest: int = 24, num_samples: int = 95, dropout: float = 0.0, **settings: Any
) -> Job:
    """AdamW; batches of 9, the last one of an epoch smaller. settings: fields of `Job`."""
    given: dict[str, Any] = {
        "model": lambda: Texts(longest=max(longest, 64), dropout=dropout),
        "loss": token_loss,
        "data": lambda: Lengths(num_samples, shortest, longest),
        "collate": padded,
        "batch_size": 9,
        "steps": 14,
        "optimizer": lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-3),
    }
    return Job(**{**given, **settings})

"""The benchmark GPT on texts of 32 to 512 tokens, padded to the longest of each batch or all to 512."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import meshloom as ml

sys.path.append(str(Path(__file__).parents[1] / "step"))
from gpt import SMALL, make_model, make_optimizer

SHORTEST, LONGEST = 32, 512
SIZE = replace(SMALL, length=LONGEST)
BATCH = 4


class Texts(Dataset[Tensor]):
    """Random tokens [length + 1]. Of the samples of a batch the first is its longest."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        longest = int(
            torch.randint(
                SHORTEST, LONGEST + 1, (1,), generator=torch.Generator().manual_seed(index // BATCH)
            )
        )
        generator = torch.Generator().manual_seed(1_000_000 + index)
        length = (
            int(torch.randint(SHORTEST, longest + 1, (1,), generator=generator)) if index % BATCH else longest
        )
        return torch.randint(SIZE.vocabulary, (length + 1,), generator=generator)


def padded(samples: Sequence[Tensor], length: int | None = None) -> tuple[Tensor, Tensor]:
    """The texts and the next tokens, -100 behind the end of each: both [batch, length]. Default: the
    longest's length."""
    length = length or max(len(each) for each in samples) - 1
    texts, following = (
        torch.zeros(len(samples), length, dtype=torch.long),
        torch.full((len(samples), length), -100),
    )
    for row, each in enumerate(samples):
        texts[row, : len(each) - 1], following[row, : len(each) - 1] = each[:-1], each[1:]
    return texts, following


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed over the tokens that count, and how many those are."""
    texts, following = batch
    total = F.cross_entropy(
        model(texts).flatten(0, 1), following.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (following != -100).sum()


def make_job(steps: int, *, to_longest: bool) -> ml.Job:
    """to_longest: of its batch, so that almost every step has another length; else of all."""
    return ml.Job(
        model=partial(make_model, SIZE),
        loss=loss,
        optimizer=make_optimizer,
        data=partial(Texts, BATCH * steps),
        collate=padded if to_longest else partial(padded, length=LONGEST),
        batch_size=BATCH,
        steps=steps,
        shuffle=False,
    )

"""What a loss is read with: batches of the job, however they are made, and never integers that mean
nothing."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.comm.objects import scatter_objects
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import DataError
from meshloom.core.job import Job
from tests.jobs import Samples
from tests.verified import equals_one_device

pytestmark = pytest.mark.usefixtures("silent_export")


class Bags(nn.Module):
    """Words [4 * batch] and where each sample's begin [batch] -> [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.EmbeddingBag(23, 8), nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.table(words, offsets))))


def job_of(collate: Any, loss: Any, model: Any = Bags) -> Job:
    generator = torch.Generator().manual_seed(1)
    data = Samples(
        words=torch.randint(23, (10, 4), generator=generator),
        label=torch.randint(5, (10,), generator=generator),
    )
    sgd: Any = lambda named: torch.optim.SGD([each for _, each in named], lr=0.1)  # noqa: E731
    return Job(
        model=model, loss=loss, data=lambda: data, collate=collate, optimizer=sgd, batch_size=4, steps=3
    )


def in_bags(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    words = torch.cat([each["words"] for each in samples])
    return {
        "words": words,
        "offsets": torch.arange(len(samples)) * 4,
        "label": torch.stack([each["label"] for each in samples]),
    }


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,tp=2"])
@pytest.mark.slow
def test_bags_with_offsets_equal_one_device(plan: str):
    """Read with samples moved one place on, they ended in "offsets[0] has to be 0, got 38". The third batch
    is a short one, of a shape of its own."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["words"], batch["offsets"]), batch["label"])

    equals_one_device(job_of(in_bags, loss), plan, steps=3)


@pytest.mark.slow
def test_a_dataclass_that_is_defined_in_a_function_is_a_batch():
    """ "Can't pickle local object": no name leads to it on another rank."""

    @dataclass(frozen=True)
    class Batch:
        words: Tensor
        label: Tensor

    def collate(samples: list[dict[str, Tensor]]) -> Batch:
        bags = in_bags(samples)
        return Batch(bags["words"].view(-1, 4).float(), bags["label"])

    job = job_of(
        collate,
        lambda model, batch: F.cross_entropy(model(batch.words), batch.label),
        lambda: nn.Linear(4, 5),
    )
    equals_one_device(job, "dp=1,tp=2")


def test_fields_are_what_is_sent_of_a_class_that_no_name_leads_to():
    @dataclass(slots=True)
    class Batch:
        x: Tensor
        words: list[str]

        def length(self) -> int:
            return len(self.words)

    Pair = namedtuple("Pair", ["one", "other"])
    sent = [Batch(torch.arange(3), ["a"]), Pair(1, "b")]
    groups = simulated_groups(2)
    _, (batch, pair) = in_turns(
        [partial(scatter_objects, group, [None, sent] if group.rank == 0 else None) for group in groups]
    )
    assert dataclasses.is_dataclass(batch) and torch.equal(batch.x, torch.arange(3)) and batch.words == ["a"]
    assert (pair.one, pair.other) == (1, "b") == pair
    with pytest.raises(
        DataError,
        match="only its fields x, words are sent to other ranks, and length is not one. Define it at the top of a module",
    ):
        batch.length()

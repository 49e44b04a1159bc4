"""What a loss is read with: batches of the job, however they are made, and never integers that mean
nothing."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

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


@pytest.mark.slow
def test_a_dataclass_that_is_defined_in_a_function_is_a_batch():
    """ "Can't pickle local object": no name leads to it on another rank."""

    @dataclass(frozen=True)
    class Batch:
        words: Tensor
        label: Tensor

    def collate(samples: list[dict[str, Tensor]]) -> Batch:
        words, label = (torch.stack([each[name] for each in samples]) for name in ("words", "label"))
        return Batch(words.float(), label)

    generator = torch.Generator().manual_seed(1)
    data = Samples(
        words=torch.randint(23, (10, 4), generator=generator),
        label=torch.randint(5, (10,), generator=generator),
    )
    job = Job(
        model=lambda: nn.Linear(4, 5), loss=lambda model, batch: F.cross_entropy(model(batch.words), batch.label), data=lambda: data, collate=collate,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), batch_size=4, steps=3,
    )  # fmt: skip
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

"""Losses of which every rank has a part of the classes: of one head, and of two that one matrix makes, so
that a rank may have all of one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from choice_jobs import job_of
from torch import Tensor, nn
from torch.nn import functional as F

from tests.division import Subject, at_random, compare, subject_of
from tests.sent import counted, predicted

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
LIMIT = 1e-10  # float64: sums in another order
CLASSES = 4


class Heads(nn.Module):
    """Vectors [b, 5] -> logits of two heads, each [b, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(5, 2 * CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.both(x).split(CLASSES, 1)


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of one head, and the same in two steps of the other."""
    one, other = model(batch["x"])
    return F.cross_entropy(one, batch["y"]) + F.nll_loss(F.log_softmax(other, 1), batch["y"], reduction="sum")


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The heads, read once."""
    generator = torch.Generator().manual_seed(0)
    one, other = (
        {"x": torch.randn(6, 5, generator=generator), "y": torch.randint(CLASSES, (6,), generator=generator)}
        for _ in range(2)
    )
    return subject_of(job_of(Heads, loss), batches=(one, other))


def test_a_rank_with_all_classes_of_a_head_waits_for_those_with_none(subject: Subject):
    """Ranks used to decide for themselves whether they talk, and one that had all classes did not."""
    talking = 0
    for seed in range(12):
        compared = compare(subject, 2 + seed % 2, at_random(seed))
        assert compared.error < LIMIT, compared.what
        talking += any(
            "OfPart" in type(node.target).__name__ for node in compared.partition.programs[0].nodes
        )
    assert talking > 3


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_send_what_they_are_said_to_send(num_ranks: int, subject: Subject):
    for decide in (at_random(5), at_random(10)):
        part = compare(subject, num_ranks, decide).partition
        assert counted(part, subject) == predicted(part)

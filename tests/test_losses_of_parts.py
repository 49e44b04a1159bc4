"""Losses of which every rank has a part of the classes: of one head, and of two that one matrix makes, so
that a rank may have all of one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_jobs import job_of
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.program.capture.capture import capture
from meshloom.program.ir.nodes import Node
from meshloom.program.operators.partial import CrossEntropyOfPart
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.division import Subject, at_random, compare, subject_of
from tests.on_ranks import run_on_ranks
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
        assert counted(part, subject.model, subject.batch, subject.outputs[0]) == predicted(part)


WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.25])


def under_autocast(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Losses of one head, with weights and without, one of scores that autocast leaves in float16, and the mean of the other."""
    with torch.autocast("cpu", torch.float16):
        one, other = model(batch["x"])
        weighted = F.cross_entropy(one, batch["y"], WEIGHTS, label_smoothing=0.1)
        scores = F.nll_loss(one - one.amax(1, keepdim=True), batch["y"])
        return F.cross_entropy(one, batch["y"]) + weighted + scores + 0.1 * other.mean().float()


def test_under_autocast_values_of_parts_are_of_the_precision_that_they_have_on_one_device():
    """Cross-entropy of a part of the classes was computed in float16, in which the gradient of a scaled mean, 65536, is infinite."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        {"x": torch.randn(6, 5, generator=generator), "y": torch.randint(CLASSES, (6,), generator=generator)}
        for _ in range(2)
    ]
    job, parts = job_of(Heads, under_autocast), 0
    layout = layout_of(capture(job, (batches[0], batches[1])), BUILT_IN)
    model = Heads()
    right = float(under_autocast(model, batches[0]).detach())

    def has_its_precision(_: int, node: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            assert value.dtype == node.outputs[0].dtype, node

    for seed in range(12):
        divided = partition(at_random(seed)(layout, 2))
        parameters = [
            {
                name: _part(each, divided.parameters[name].held[rank])
                for name, each in model.named_parameters()
            }
            for rank in range(2)
        ]
        results = run_on_ranks(
            divided.programs,
            parameters,
            [{}, {}],
            batches[0],
            lambda *_: None,
            seed=seed,
            visit=has_its_precision,
        )
        assert all(float(each.detach()) == pytest.approx(right, rel=5e-3) for each in results)
        parts += any(isinstance(node.target, CrossEntropyOfPart) for node in divided.programs[0].nodes)
    assert parts > 3


def _part(value: Tensor, held: Any) -> Tensor:
    for dim, runs in enumerate(held):
        if runs is not None:
            value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return value.detach().clone().requires_grad_()

"""Convolutions with the change of placement of their input: as one device, with the collectives of layers
that share it counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from meshloom.core.job import Job
from meshloom.program.operators.convolutions import GatheredConvolutions
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from tests.division import at_random, compare, subject_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class Residual(nn.Module):
    """A first layer and a shortcut that read the same picture; two channels, fewer than some teams have
    ranks; odd sizes."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        layer: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.stem = layer(3, 7, 3, padding=1)
        self.first = layer(7, 5, 3, stride=2, padding=1)
        self.shortcut = layer(7, 6, 1, stride=2, bias=False)
        self.second = layer(5, 6, 3, padding=2, dilation=2)
        self.few = layer(6, 2, 2)
        self.head = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        x = self.shortcut(x) + self.second(F.gelu(self.first(x)))
        return self.head(F.gelu(self.few(F.gelu(x))).flatten(2).mean(2))


def job_of(dims: int) -> Job:
    return Job(
        model=lambda: Residual(dims),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        data=lambda: TensorDataset(torch.randn(12, 3, *(9, 7, 5)[:dims]), torch.arange(12) % 4),
        batch_size=4,
        steps=2,
    )


def layers_in(program: Any) -> list[GatheredConvolutions]:
    return [node.target for node in program.nodes if isinstance(node.target, GatheredConvolutions)]


@pytest.mark.covering("1-3", "2-2", "3-1")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_in_lockstep_they_equal_one_device(dims: int, seed: int):
    """Divisions drawn at random; four ranks are more than `few` has channels."""
    subject = subject_of(job_of(dims))
    for num_ranks in (2, 3, 4):
        compared = compare(subject, num_ranks, at_random(seed))
        assert compared.error <= 1e-12, compared.what
        shapes = [
            [len(each.layers) for each in layers_in(program)] for program in compared.partition.programs
        ]
        assert shapes == shapes[:1] * num_ranks, "ranks would talk in another order"


@pytest.mark.parametrize(
    ("placements", "at_least"),
    [
        ("stem:column+first:row", 0),
        ("first:column+shortcut:column", 0),
        ("stem:row+first:column+shortcut:column+few:row", 1),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.slow
def test_ranks_that_talk_as_they_compute_train_like_one_device(
    placements: str, at_least: int, num_ranks: int
):
    states: list[dict[str, Tensor]] = []
    for plan in ("dp=1", f"tp={num_ranks},tp_placements={placements}"):
        with Trainer(job_of(2), plan, devices="simulated", dtype=torch.float64) as trainer:
            for batch in trainer.batches():
                trainer.step(batch)
            states.append(trainer.together(full_state)[0])
            division = trainer.replicas[0].engine.stages.division
        if division:
            assert (
                max((len(each.layers) for each in layers_in(division.first.programs[0])), default=0)
                >= at_least
            )
    for name, one in states[0].items():
        assert torch.allclose(one, states[1][name], rtol=1e-9, atol=1e-12), name

"""Buffers of a module whose replicas all have the whole batch are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.plan import Plan
from meshloom.launch.opening import open_world
from meshloom.loops import taken_shares
from meshloom.loops.parallel import _execution  # pyright: ignore[reportPrivateUsage]
from meshloom.loops.ranks import LoopRanks

RULES: Any = {"seen": "sum", "mean": ml.ema(0.9)}


class Normed(nn.Module):
    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 64),
            nn.BatchNorm1d(64),
            nn.Tanh(),
            nn.Linear(64, 8),
            nn.BatchNorm1d(8, momentum=0.3),
        )
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        self.seen += 1
        self.mean.mul_(0.9).add_(0.1 * (y.detach() + x.mean()).mean(0))
        return y


def trained(model: nn.Module, call: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(1)
    for rows in (8, 8, 6):
        optimizer.zero_grad()
        call(torch.randn(rows, 6, generator=draws, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def made() -> Normed:
    torch.manual_seed(0)
    return Normed().double()


@pytest.fixture(autouse=True)
def _no_shares() -> None:
    taken_shares._RECENT.clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "plan",
    [
        *("dp=2", "dp=3,zero=1", "dp=2,zero=3"),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("dp=2,tp=2", "dp=2,tp=2,zero=1", "dp=2,pp=2")
        ),
    ],
)
def test_whole_batches_on_all_replicas_count_once(plan: str) -> None:
    alone, parsed = made(), Plan.parse(plan)
    trained(alone, alone)
    expected = dict(alone.named_buffers())
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> dict[str, Tensor]:
            model = made()
            execution = _execution(model, LoopRanks(parsed, world, own), (), RULES, {}, None)
            trained(model, lambda x: execution.call(model.__call__, [x], {}))
            return {name: gather().clone() for name, gather in execution.tensors() if name in expected}

        found = world.turns.run([lambda own=own: of_rank(own) for own in world.local])
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-13)  # sums of ranks have another order

"""Running statistics of replicas are one device's: of whole batches that all have, and of shares that they normalize together."""

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
    alone = made()
    trained(alone, alone)
    for each in of_ranks(plan, made, RULES, lambda x, replica: x):
        expected = dict(alone.named_buffers())
        found = {name: each[name] for name in expected}
        torch.testing.assert_close(
            found, expected, rtol=1e-12, atol=1e-13
        )  # sums of ranks have another order


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_layers_normalize_by_all_shares_together(plan: str, shares: bool) -> None:
    alone = made().layers
    trained(alone, alone)
    half = (lambda x, replica: x.chunk(2)[replica]) if shares else (lambda x, replica: x)
    for each in of_ranks(f"{plan},sync_batch_norm=true", lambda: made().layers, {}, half):
        torch.testing.assert_close(each, dict(alone.state_dict()), rtol=1e-12, atol=1e-13)


def of_ranks(text: str, make: Any, rules: Any, share: Any) -> list[dict[str, Tensor]]:
    """The whole state that each rank has of `make()` after training on `share(x, replica)`."""
    plan = Plan.parse(text)
    with open_world(plan.mesh, "simulated") as world:

        def of_rank(own: Any) -> dict[str, Tensor]:
            model, ranks = make(), LoopRanks(plan, world, own)
            execution = _execution(model, ranks, (), rules, {}, None)
            trained(model, lambda x: execution.call(model.__call__, [share(x, ranks.replica)], {}))
            return {name: gather().clone() for name, gather in execution.tensors()}

        return world.turns.run([lambda own=own: of_rank(own) for own in world.local])

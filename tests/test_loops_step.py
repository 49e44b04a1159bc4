"""`ml.train_step`: what a call and a backward leave, by any schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.errors import CaptureError, JobError
from meshloom.core.plan import Plan
from meshloom.launch.opening import open_world
from meshloom.loops import taken_shares
from meshloom.loops.part_tensor import plain
from meshloom.loops.pipelined_module import PipelinedModule
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import TakenShare, share_sizes

pytestmark = pytest.mark.long
EXACT = 1e-13  # float64; sums over microbatches have another order
Loss = Callable[[nn.Module, Any], Any]
TOKENS = torch.randint(0, 50, (8, 13), generator=torch.Generator().manual_seed(0))
TOKENS[1, 5:], TOKENS[5, 2:] = 0, 0  # of short ones


class Deep(nn.Module):
    """An embedding tied to the head, and a block for each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(6)
        )
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def over_tokens(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over tokens that are there, and their number."""
    tokens = batch["tokens"]
    losses = F.cross_entropy(
        model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], ignore_index=0, reduction="sum"
    )
    return losses, (tokens[:, 1:] != 0).sum()


def over_samples(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over samples, with a penalty."""
    tokens = batch["tokens"]
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean() + 1e-3 * model.get_parameter("blocks.0.1.weight").square().sum()


def over_pairs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a batch's samples with each other."""
    found = model(batch["tokens"]).mean(1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def gradients(model: nn.Module, loss: Loss, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """On one device: of two steps of SGD, the loss of the second, and its gradients."""
    optimizer, value = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(())
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model, {"tokens": tokens})
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        optimizer.step()
    return value.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}  # fmt: skip


def on_ranks(plan: str, loss: Loss, steps: int = 2) -> list[Any]:
    """The same for each rank; and the share of the parameters that it has."""
    parsed, model_size = Plan.parse(plan), sum(each.numel() for each in Deep().parameters())
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> Any:
            model = Deep()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            divided = PipelinedModule(model, LoopRanks(parsed, world, own))
            share = TakenShare(share_sizes(len(TOKENS), parsed.dp), own.place.dp)
            tokens = TOKENS[share.start : share.start + share.rows]
            value = torch.zeros(())
            for _ in range(steps):
                optimizer.zero_grad()
                taken_shares.took(share, tokens)
                found = divided.step(loss, {"tokens": tokens})
                value = found.total / found.weight
                if not found.is_mean:
                    sums = torch.stack([found.total.detach(), found.weight])
                    own.groups["dp"].all_reduce(sums).wait()
                    value = found.total / sums[1] * parsed.dp
                value.backward()
                optimizer.step()
            reported = value.detach().clone()
            own.groups["dp"].all_reduce(reported).wait()
            elements = sum(plain(each.detach()).numel() for each in model.parameters())
            with divided.whole():
                grads = {
                    name: each.grad.clone()
                    for name, each in model.named_parameters()
                    if each.grad is not None
                }
            return reported / parsed.dp, grads, elements / model_size

        return world.turns.run([lambda own=own: of_rank(own) for own in world.local])


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ("pp=2,microbatches=4,schedule=1f1b", over_tokens),
        ("pp=2,microbatches=4,schedule=interleaved,virtual_stages=2", over_samples),
        ("pp=2,microbatches=3,schedule=zb-h1", over_tokens),
        ("pp=2,microbatches=4,schedule=zb-v", over_samples),
        ("pp=2,microbatches=4,schedule=found", over_tokens),
        pytest.param("pp=3,microbatches=3,schedule=gpipe", over_tokens, marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,microbatches=2,schedule=1f1b", over_tokens, marks=pytest.mark.slow),
        ("dp=2,pp=2,microbatches=2,schedule=zb-h1,zero=1", over_tokens),
        pytest.param("pp=2,tp=2,microbatches=2,schedule=1f1b", over_samples, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_step_by_any_schedule_is_that_of_one_device(plan: str, loss: Loss) -> None:
    expected, grads = gradients(Deep(), loss, TOKENS)
    for value, found, share in on_ranks(plan, loss):
        torch.testing.assert_close(value, expected, rtol=EXACT, atol=EXACT)
        assert found.keys() == grads.keys()
        torch.testing.assert_close(found, grads, rtol=EXACT, atol=EXACT)
        assert share < (0.8 if "zero" not in plan else 0.45)


def test_a_loss_that_microbatches_change_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"return the sum and what it counts"):
        on_ranks("pp=2,microbatches=2", over_pairs)


def test_a_loss_made_anew_in_each_step_is_refused() -> None:
    def each_time(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made: Loss = lambda model, batch: model(batch["tokens"]).square().mean()  # noqa: E731
        return made(model, batch)

    parsed = Plan.parse("pp=2,microbatches=2")
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> None:
            divided = PipelinedModule(Deep(), LoopRanks(parsed, world, own))
            for _ in range(2):
                divided.step(lambda model, batch: each_time(model, batch), {"tokens": TOKENS})

        with pytest.raises(JobError, match="outside of the loop"):
            world.turns.run([lambda own=own: of_rank(own) for own in world.local])


def test_without_a_plan_a_step_is_forward_and_backward() -> None:
    expected, grads = gradients(Deep(), over_tokens, TOKENS)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = torch.zeros(())
    for _ in range(2):
        optimizer.zero_grad()
        value = ml.train_step(model, {"tokens": TOKENS}, over_tokens)
        optimizer.step()
    assert not value.requires_grad
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, grads
    )

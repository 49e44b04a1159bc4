"""`ml.parallel(weight=...)`: a mean over tokens is one device's, however many of them replicas and microbatches have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.loops.ranks import leave_ranks
from tests.processes import on_ranks

F64, STEPS = torch.float64, 3
Found = tuple[list[float], dict[str, Tensor], list[str]]


class Language(nn.Module):
    """Logits, and the mean over tokens that have a label."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(4))
        )
        self.head = nn.Linear(width, 19)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.blocks(self.tokens(tokens)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), labels), logits


def valid(tokens: Tensor, labels: Tensor | None = None) -> Tensor | None:
    return None if labels is None else (labels != -100).sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of 7 rows, from 1 to all 11 of whose tokens have labels."""
    draws, found = torch.Generator().manual_seed(1), list[tuple[Tensor, Tensor]]()
    for _ in range(STEPS):
        tokens = torch.randint(0, 19, (7, 11), generator=draws)
        labels = torch.randint(0, 19, (7, 11), generator=draws)
        labels[torch.arange(11) >= torch.tensor([11, 9, 1, 5, 2, 1, 3])[:, None]] = -100
        found.append((tokens, labels))
    return found


def trained(plan: str | None, weight: Any = valid, rows: bool = False) -> Found:
    """On this rank: of each step the global batch's loss, of evaluation too; the last gradients; notes. rows: the script computes the loss."""
    torch.manual_seed(0)
    model = ml.parallel(Language().to(F64), plan, weight=weight)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
    try:
        for tokens, labels in batches():
            optimizer.zero_grad()
            mine, of_mine = ml.share((tokens, labels))
            found = model(mine, labels=of_mine)
            loss = F.cross_entropy(found[1].transpose(1, 2), of_mine) if rows else found[0]
            loss.backward()
            optimizer.step()
            losses.append(float(ml.mean(loss.detach())))
        with torch.no_grad():
            tokens, labels = ml.share(batches()[0])
            model(tokens)
            losses.append(float(ml.mean(model(tokens, labels)[0])))
        with ml.whole(model):
            grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    finally:
        leave_ranks(well=len(losses) > STEPS)
    return losses, grads, []


def differs(found: Found, expected: Found) -> float:
    """The largest difference of a loss or a gradient."""
    assert found[1].keys() == expected[1].keys()
    of_losses = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    return max(of_losses, *(float((found[1][name] - each).abs().max()) for name, each in expected[1].items()))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("dp=2", 2),
        ("dp=3,zero=3", 3),
        pytest.param("tp=2", 2, marks=pytest.mark.long),
        pytest.param("pp=2,microbatches=3", 2, marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,microbatches=2", 4, marks=pytest.mark.slow),
    ],
)
def test_a_mean_over_tokens_is_one_device_s(plan: str, size: int) -> None:
    expected = trained(None)
    for found in on_ranks(trained, size, plan, timeout_seconds=200.0):
        assert differs(found, expected) < 1e-12  # float64; sums over parts have another order

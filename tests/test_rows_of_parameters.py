"""A parameter of which single rows are read by themselves is divided by its rows, and one device computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml
from tests.covering import slow
from tests.verified import equals_one_device

pytestmark = pytest.mark.long
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a class and patches": lambda x, w: torch.cat([w[:1].expand(len(x), -1, -1), x + w[1:]], 1),
    "squeezed": lambda x, w: x + w[:8] + w[8:].squeeze(0) * w[8:].view(32),
    "reduced": lambda x, w: x + w[-1:].mean(0) + w[:-1].amax(0) + w[8:].amax(0),
    "beside each other": lambda x, w: x + w[1:] * w[:-1] + w[:1] - w[-1:],
    "normed": lambda x, w: x + F.layer_norm(w[:8], (32,)) + F.layer_norm(w[8:], (32,)).softmax(0),
    "products": lambda x, w: x + w[1:8].sum(0) + w[:1] @ w[8:].T,
}


class Net(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.places, self.read = nn.Embedding(9, 32), read
        self.up, self.down, self.head = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x, self.places.weight)
        return self.head((x + self.down(torch.tanh(self.up(x)))).mean(1))


@pytest.mark.parametrize("plan", ["tp=3", slow("tp=2,pp=2,microbatches=2")])
@pytest.mark.parametrize("kind", ["a class and patches", "reduced", *(slow(each) for each in READ if each not in ("a class and patches", "reduced"))])  # fmt: skip
def test_single_rows_are_of_one_rank(kind: str, plan: str) -> None:
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(16, 8, 32, generator=drawn), torch.randint(5, (16,), generator=drawn))
    job = ml.Job(
        model=lambda: Net(READ[kind]), loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), data=lambda: data, batch_size=8, steps=2,
    )  # fmt: skip
    equals_one_device(job, f"{plan},tp_placements=places:dim0")

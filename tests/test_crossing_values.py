"""Values that go from stage to stage keep the order of their elements, however they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.plan import Plan
from tests.verified import equals_one_device


class Turned(nn.Module):
    """[n, 3, 5] -> [n, 3, 5], through [n, 5, 3] that is seen the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.before(x)).transpose(1, 2)).transpose(1, 2)


@pytest.mark.long
@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize("cut", [pytest.param("0.after", marks=pytest.mark.slow), "1"])
def test_a_transposed_value_crosses(cut: str) -> None:
    job = ml.Job(
        model=lambda: nn.Sequential(Turned(), Turned()),
        loss=lambda model, x: model(x).square().mean(),
        data=lambda: list(torch.randn(24, 3, 5, generator=torch.Generator().manual_seed(0))),
        batch_size=8,
        steps=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    plan = Plan.parse(f"pp=2,microbatches=2,cuts={cut}")
    equals_one_device(job, plan)

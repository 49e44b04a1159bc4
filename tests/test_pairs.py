"""A parameter that a forward takes for complex numbers, between others of odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from tests.verified import equals_one_device


class Spectral(nn.Module):
    """[n, 3] -> [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.spectrum = nn.Parameter(torch.randn(2, 3, 2))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.spectrum).sum(0)
        return x * self.scale * turned.real + turned.imag + self.shift


def job() -> ml.Job:
    return ml.Job(
        model=lambda: nn.Sequential(Spectral(), nn.Linear(3, 3), Spectral()),
        loss=lambda model, x: model(x).square().mean(),
        data=lambda: list(torch.randn(24, 3, generator=torch.Generator().manual_seed(0))),
        batch_size=8,
        steps=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "plan", ["dp=2,zero=1", "dp=2,zero=2,microbatches=2", "dp=2,zero=3", "dp=3,exchange=server"]
)
def test_it_is_where_torch_takes_it_for_complex_numbers(plan: str) -> None:
    equals_one_device(job(), plan)

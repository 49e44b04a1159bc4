"""Runs with a part that is not read resume from each other's checkpoints, under whatever plan: parameters, buffers
that the part writes, and draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshloom.core.job import Job
from tests.fitted import fitted

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class Router(nn.Module):
    """Looks at a value, counts its calls, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Linear(10, 10), nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.dropout(self.weight(x))
        return x * 1.5 if float(x.detach().sum()) > 0 else x


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 10), Router(), nn.Linear(10, 22), nn.BatchNorm1d(22), nn.ReLU(), nn.Linear(22, 3)
    ).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def job() -> Job:
    source = torch.Generator().manual_seed(1)
    samples = TensorDataset(
        torch.randn(24, 7, generator=source).double(), torch.randn(24, 3, generator=source).double()
    )
    return Job(
        model=model, data=lambda: samples, loss=loss, batch_size=6, steps=6,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.05, momentum=0.9), buffers={"1.seen": "sum"},
    )  # fmt: skip


def trained(plan: str, out: Path, *, steps: int, resume: Path | None = None) -> dict[str, Tensor]:
    """What the checkpoint has after so many steps."""
    fitted(job(), f"{plan},keyed_draws=true", cache="off", out=out, steps=steps, resume=resume)
    return load_file(out / f"step-{steps:08d}" / "model.safetensors")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=2,microbatches=2", "pp=2,microbatches=2"),
        ("dp=2,zero=3", "dp=2,pp=2,tp=2"),
        ("dp=2,pp=2,tp=2", "dp=1,microbatches=2"),
    ],
)
@pytest.mark.slow
def test_a_run_resumes_under_another_plan(first: str, second: str, tmp_path: Path):
    expected = trained("dp=1,microbatches=2", tmp_path / "one", steps=6)
    trained(first, tmp_path / "run", steps=3)
    found = trained(second, tmp_path / "run", steps=6, resume=tmp_path / "run")
    assert found.keys() == expected.keys() and found["1.seen"] == 12
    for name, each in expected.items():
        assert torch.allclose(found[name], each, rtol=0.0, atol=1e-10), name

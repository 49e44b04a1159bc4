"""Buffers that refuse other values are merged by the one rule, and those that have no elements at first are refused: torch's observers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional as F

from meshloom.core.errors import JobError
from meshloom.train.trainer import Trainer
from tests.opaque_jobs import WIDTH, Net, job_of
from tests.verified import equals_one_device

pytestmark = [
    pytest.mark.usefixtures("silent_export", "dear_memory"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*reduce_range will be deprecated.*:UserWarning"),
]
UNSIGNED = {"quant_min": 0, "quant_max": 255}


class Quantized(nn.Module):
    """A layer whose weight and output go through fake quantisation."""

    def __init__(self, weight: Callable[[], nn.Module], output: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear, self.weight, self.output = nn.Linear(WIDTH, WIDTH), weight(), output()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.output(F.linear(x, self.weight(self.linear.weight), self.linear.bias))


def averages() -> nn.Module:
    return Quantized(
        nn.Identity,
        quantization.FakeQuantize.with_args(observer=quantization.MovingAverageMinMaxObserver, **UNSIGNED),
    )


def extremes() -> nn.Module:
    return Quantized(
        nn.Identity, quantization.FakeQuantize.with_args(observer=quantization.MinMaxObserver, **UNSIGNED)
    )


def histogram() -> nn.Module:
    return Quantized(nn.Identity, lambda: quantization.HistogramObserver(bins=32))


def fused() -> nn.Module:
    kind = quantization.FusedMovingAvgObsFakeQuantize
    return Quantized(
        nn.Identity, kind.with_args(observer=quantization.MovingAverageMinMaxObserver, **UNSIGNED)
    )


# torch's fused operator has no float64
PARTS = {"averages": averages, "extremes": extremes, "histogram": histogram, "fused": fused}


@pytest.mark.long
@pytest.mark.covering("dp=2,zero=3-histogram", "dp=2,microbatches=2-extremes")
@pytest.mark.parametrize("name", sorted(PARTS))
@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,microbatches=2"])
def test_observers_equal_one_device(name: str, plan: str) -> None:
    dtype = None if name == "fused" else torch.float64
    job = job_of(lambda: Net([PARTS[name]()], "0"))
    equals_one_device(job, plan, steps=3, dtype=dtype)


@pytest.mark.long
def test_extremes_of_channels_which_have_no_shape_at_first_are_refused() -> None:
    job = job_of(
        lambda: Net([Quantized(lambda: quantization.PerChannelMinMaxObserver(ch_axis=0), nn.Identity)], "0")
    )
    with (
        Trainer(job, "dp=2", devices="simulated") as trainer,
        pytest.raises(JobError, match="the buffer .*min_val, which was .* A buffer keeps its shape"),
    ):
        trainer.fit()

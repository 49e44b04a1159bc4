"""What a forward does besides its result is as on one device: features that hooks leave, batches that norms count."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.covering import slow
from tests.opaque_jobs import LENGTH, WIDTH, Net, job_of
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.ReLU(), nn.BatchNorm1d(LENGTH)
        )

    def forward(self, x: Tensor) -> Any:
        if self.how == "sequential":
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
        return checkpoint(self.layers, x, use_reentrant=self.how == "reentrant")


def with_features() -> nn.Module:
    model: Any = Net([], "rr")
    features: dict[str, Tensor] = {}
    model.blocks[0].register_forward_hook(lambda module, given, made: features.update(first=made))
    model.features = features
    return model


def of_features(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"]) + 0.1 * model.features["first"].square().mean()


@pytest.mark.parametrize("how", ["reentrant", "plain", "sequential"])
@pytest.mark.slow
def test_norms_in_checkpointed_blocks_count_both_runs(how: str) -> None:
    job = job_of(lambda: Net([Checkpointed(how)]))
    equals_one_device(job, "dp=2,tp=2")


@pytest.mark.parametrize("plan", ["dp=2", slow("pp=2,tp=2")])
def test_features_that_a_hook_leaves_are_read(plan: str) -> None:
    job = job_of(with_features, loss=of_features)
    equals_one_device(job, plan)

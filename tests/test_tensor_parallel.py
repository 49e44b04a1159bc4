"""Plans with tp train what one device trains: on simulated ranks and on processes, with every optimizer, from
checkpoint to checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer
from tests.families import FAMILIES
from tests.jobs import Samples, make_job
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def keyed(job: Job, plan: str, **settings: Any) -> Trainer:
    return Trainer(job, f"{plan},keyed_draws=true", devices="simulated", dtype=torch.float64, **settings)


@pytest.mark.slow
def test_heads_that_several_ranks_share_equal_one_device():
    # 6 heads in 2 groups on 4 ranks: keys and values of a group lie on two ranks, whose gradients are parts
    # of one sum.
    plan = Plan(tp=4, tp_placements={"model.layers.*.self_attn.*": "heads"})
    equals_one_device(FAMILIES["llama"].make_job(True), plan)
    with keyed(FAMILIES["llama"].make_job(False), str(plan), steps=2) as trainer:
        shards = trainer.replicas[0].shards
        assert shards is not None
        assert any(pieces.is_shared for pieces in shards.pieces.values())
        summary = trainer.fit()
    assert summary.predicted == summary.counted


class SharedValues(nn.Module):
    """Attention with 4 query heads and 2 key and value heads, whose values are read by a layer beside it,
    too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.q, self.o, self.u = (
            nn.Linear(*sizes) for sizes in ((24, 24), (24, 24), (24, 24), (72, 24))
        )
        self.kk, self.v = nn.Linear(24, 12), nn.Linear(24, 12)
        self.g = nn.Linear(12, 72) if kind == "linear" else nn.Conv1d(12, 72, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        values = self.v(x)
        q, k, v = (each.unflatten(-1, (-1, 6)).transpose(1, 2) for each in (self.q(x), self.kk(x), values))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        beside = (
            self.g(values)
            if isinstance(self.g, nn.Linear)
            else self.g(values.transpose(1, 2)).transpose(1, 2)
        )
        return self.o(heads.transpose(1, 2).flatten(2)) + self.u(torch.tanh(beside))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.slow
def test_values_of_shared_heads_that_another_layer_reads_have_one_gradient(kind: str):
    """Two ranks hold the same two heads, and each was given the sum of what the further layer sends back,
    which so was counted twice."""
    pins = {"q": "heads", "kk": "heads", "v": "heads", "g": "column", "u": "row"}
    texts = torch.randn(8, 5, 24, generator=torch.Generator().manual_seed(4))
    job = Job(
        model=lambda: SharedValues(kind), loss=lambda model, batch: model(batch["x"]).square().mean(), batch_size=4, steps=2,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), data=lambda: Samples(x=texts),
    )  # fmt: skip
    equals_one_device(job, Plan(tp=4, tp_placements=pins))
    with keyed(job, str(Plan(tp=4, tp_placements=pins)), steps=2) as trainer:
        summary = trainer.fit()
    assert summary.predicted == summary.counted


@pytest.mark.slow
def test_tables_of_bags_are_divided_by_rows():
    """In lockstep they were; a rank's own program had no name for what looks up a part of the rows
    ("'BagsOfPart' object has no attribute '__name__'")."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums, self.means = (
                nn.EmbeddingBag(11, 5, mode="sum", padding_idx=0),
                nn.EmbeddingBag(11, 5, mode="mean"),
            )
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.sums(x) + self.means(x))

    words = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(5))
    job = Job(
        model=Bags, loss=lambda model, batch: model(batch["x"]).square().mean(), batch_size=4, steps=2,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), data=lambda: Samples(x=words),
    )  # fmt: skip
    report = equals_one_device(job, "tp=2,tp_placements=sums:vocabulary+means:vocabulary")
    assert max(report.owned) < 0.97


def test_what_is_divided_takes_less_of_every_rank():
    with keyed(make_job("mlp", "adamw"), "tp=2,tp_placements=first:column+second:row") as trainer:
        one, other = trainer.replicas
        assert one.engine.stages.division is not None
        divided = [name for name, _ in one.named if name in one.shards.pieces]
        assert {"first.weight", "first.bias", "second.weight"} <= set(divided)
        for name, parameter in one.named:
            whole = torch.Size(one.shards.whole_shape(name, parameter)).numel()
            parts = parameter.numel() + dict(other.named)[name].numel()
            assert parts == (whole if name in divided else 2 * whole)
            assert parameter.untyped_storage().nbytes() == parameter.nbytes  # the rest is let go

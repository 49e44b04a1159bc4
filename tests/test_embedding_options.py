"""Options of embeddings and bags under every plan: offsets, weights of entries, padding_idx, scale_grad_by_freq, max_norm,
sparse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import JobError
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.covering import marked
from tests.verified import equals_one_device

ROWS = 23
PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2", "microbatches=3", "dp=2,zero=1,microbatches=3",
         "dp=2,zero=3,tp=2,microbatches=3"]  # fmt: skip

Look = Callable[[Any, dict[str, Tensor]], Tensor]


class Network(nn.Module):
    """Three layers of odd sizes."""

    def __init__(self, table: nn.Module, look: Look) -> None:
        super().__init__()
        self.table, self.look = table, look
        self.middle, self.last = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(torch.tanh(self.middle(self.look(self.table, batch))))


def samples() -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(3)
    found: list[dict[str, Tensor]] = []
    for _ in range(24):
        count = int(torch.randint(1, 6, (), generator=draws))
        x, w = torch.randint(0, ROWS, (count,), generator=draws), torch.rand(count, generator=draws)
        found.append({"x": x, "w": w, "y": torch.randint(0, 5, (), generator=draws)})
    return found


def in_a_row(given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Bags of several sizes, with the offsets where they begin."""
    sizes = torch.tensor([0, *(len(each["x"]) for each in given)])
    x, w = (torch.cat([each[name] for each in given]) for name in "xw")
    return {"x": x, "w": w, "offsets": sizes[:-1].cumsum(0), "y": torch.stack([each["y"] for each in given])}


def of_four(given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Bags of four, some rows more than once."""
    x = torch.stack([each["x"][torch.arange(4) % len(each["x"])] for each in given])
    return {"x": x, "y": torch.stack([each["y"] for each in given])}


def bag(table: Any, batch: dict[str, Tensor]) -> Tensor:
    return table(batch["x"], batch["offsets"])


def weighted(table: Any, batch: dict[str, Tensor]) -> Tensor:
    return table(batch["x"], batch["offsets"], per_sample_weights=batch["w"])


def plain(table: Any, batch: dict[str, Tensor]) -> Tensor:
    return table(batch["x"])


def mean(table: Any, batch: dict[str, Tensor]) -> Tensor:
    return table(batch["x"]).mean(1)


def function(table: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.embedding_bag(batch["x"], table.weight, batch["offsets"], mode="sum", padding_idx=2)


CASES: dict[str, tuple[Any, dict[str, Any], Look, Any]] = {
    "offsets": (nn.EmbeddingBag, {}, bag, in_a_row),
    "sum": (nn.EmbeddingBag, {"mode": "sum"}, bag, in_a_row),
    "max": (nn.EmbeddingBag, {"mode": "max"}, bag, in_a_row),
    "weights": (nn.EmbeddingBag, {"mode": "sum"}, weighted, in_a_row),
    "function": (nn.EmbeddingBag, {}, function, in_a_row),
    "padding of bags": (nn.EmbeddingBag, {"padding_idx": 3}, bag, in_a_row),
    "padding": (nn.Embedding, {"padding_idx": 3}, mean, of_four),
    "frequencies of bags": (nn.EmbeddingBag, {"scale_grad_by_freq": True}, bag, in_a_row),
    "frequencies": (nn.Embedding, {"scale_grad_by_freq": True}, mean, of_four),
    "sparse bags": (nn.EmbeddingBag, {"sparse": True}, bag, in_a_row),
}
NORMS: dict[str, tuple[Any, dict[str, Any], Look, Any]] = {
    "bags": (nn.EmbeddingBag, {"max_norm": 1.5}, bag, in_a_row),
    "bags of four": (nn.EmbeddingBag, {"max_norm": 1.5, "norm_type": 1.0}, plain, of_four),
    "weighted bags": (nn.EmbeddingBag, {"max_norm": 1.5, "mode": "sum"}, weighted, in_a_row),
    "rows": (nn.Embedding, {"max_norm": 1.5}, mean, of_four),
    "sparse": (nn.Embedding, {"max_norm": 1.5, "sparse": True}, mean, of_four),
}


def job(case: str, **settings: Any) -> Job:
    made, options, look, collate = {**CASES, **NORMS}[case]
    return Job(
        **{
            "model": lambda: Network(made(ROWS, 7, **options), look),
            "loss": lambda model, batch: F.cross_entropy(model(batch), batch["y"]),
            "optimizer": lambda named: torch.optim.SGD([each for _, each in named], lr=0.5),
            "data": samples,
            "collate": collate,
            "batch_size": 6,
            "steps": 3,
            **settings,
        }
    )


OFTEN = [("sum", "dp=2,pp=2,tp=2"), ("weights", "tp=2")]
USUAL = [("offsets", "dp=2"), ("padding", "dp=2,zero=3")]


@pytest.mark.covering("offsets", "zero=3")
@pytest.mark.parametrize(("case", "plan"), marked(USUAL, OFTEN, product(CASES, PLANS)))
@pytest.mark.long
def test_embeddings_are_one_device_s(case: str, plan: str) -> None:
    equals_one_device(job(case), plan, steps=3)


@pytest.mark.parametrize("case", NORMS)
def test_max_norm_scales_rows_with_one_chunk_a_step(case: str) -> None:
    """An evaluation, which scales what it reads, too, is put back."""
    evaluate = Evaluate(samples, {"loss": lambda model, batch: F.cross_entropy(model(batch), batch["y"])}, 1)
    equals_one_device(job(case, evaluate=evaluate), Plan(), steps=3)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("dp=2", "a step of dp=2 has 2 chunks. Use one chunk"),
        ("dp=2,zero=3,microbatches=3", "has 6 chunks"),
        ("tp=2", "under .*tp=2 updates alone write what is trained. Use dp=1"),
    ],
)
@pytest.mark.parametrize("case", ["rows", "bags"])
def test_max_norm_is_refused_elsewhere_before_the_first_step(case: str, plan: str, why: str) -> None:
    with pytest.raises(
        JobError, match=f"table.weight has max_norm, which scales its rows in the forward, and .*{why}"
    ):
        Trainer(job(case), plan, devices="simulated", listener=QUIET)

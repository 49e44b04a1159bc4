"""Rows of unequal length as nested tensors, made in the model or in collate; functions that no module holds and that look at values; lazy layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

DATA = {"x": normal(601, 6, 8), "y": integers(602, 5)}


def _classify(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


class OnNested(nn.Module):
    """Linear layers on a jagged tensor, summed over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, nested: Tensor) -> Tensor:
        return self.two(torch.nested.to_padded_tensor(torch.tanh(self.one(nested)), 0.0).sum(1))


class Nesting(OnNested):
    """Cuts the rows of its input to lengths of their own."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [x[row, : 2 + row % 3] for row in range(len(x))]
        return super().forward(torch.nested.as_nested_tensor(rows, layout=torch.jagged))


def _nested(rows: list[Any]) -> Any:
    parts = [row["x"][: 2 + int(row["y"]) % 4] for row in rows]
    return {
        "x": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "y": torch.stack([row["y"] for row in rows]),
    }


def nested_in_the_model() -> Job:
    return job_of(Nesting, _classify, DATA)


def nested_in_the_batch() -> Job:
    return job_of(OnNested, _classify, DATA, collate=_nested)


def _doubled_where_positive(h: Tensor) -> Tensor:
    """Columns are looked at one by one, outside of all modules."""
    kept = [column for column in range(h.shape[1]) if float(h[:, column].detach().sum()) > 0]
    out = torch.zeros_like(h)
    out[:, kept] = 2 * h[:, kept]
    return out + h


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(_doubled_where_positive(torch.tanh(self.up(x))))


def functions_on_values_in_blocks() -> Job:
    return job_of(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 16), Residual(), Residual(), nn.Linear(16, 5)),
        _classify,
        DATA,
    )


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(5))
    model(torch.zeros(2, 6, 8))
    return model


def lazy_layers_with_norm() -> Job:
    return job_of(_lazy, _classify, DATA)

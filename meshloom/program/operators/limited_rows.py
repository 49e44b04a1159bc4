"""Embeddings with `max_norm`, without a write to their weight: rows that are longer are scaled where they are read.

torch scales the rows that a forward reads in the weight itself, and computes the gradient of the scaled rows:

    weight[rows] *= min(1, max_norm / norm);   result = weight[rows]        torch
    result = weight[rows] + constant(weight[rows] * (scale - 1))            here; the weight is scaled after the chunks

A row that was scaled is not scaled again, so chunks may do it in any order, and at the same time on several replicas.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """Of a table of `rows`: the largest norm of a row that is used."""

    rows: int
    largest: float
    norm_type: float

    def scales(self, norms: Tensor) -> Tensor:
        """What rows of these norms are multiplied by, as in torch."""
        return torch.where(norms > self.largest, self.largest / (norms + 1e-7), 1.0)


def limits_of(model: nn.Module) -> dict[str, RowLimit]:
    """The trained tables of its embeddings with max_norm, by the first of their names."""
    limits = {
        id(each.weight): RowLimit(rows=len(each.weight), largest=each.max_norm, norm_type=each.norm_type)
        for each in _modules(model)
    }
    return {name: limits[id(each)] for name, each in model.named_parameters() if id(each) in limits}


@contextmanager
def limited(model: nn.Module) -> Iterator[None]:
    """A context in which the training and evaluation of these embeddings write to no weight."""
    changed = [each for each in _modules(model) if "forward" not in vars(each)]
    for module in changed:
        function = _embedding if isinstance(module, nn.Embedding) else _bag
        module.forward = types.MethodType(function, module)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _modules(model: nn.Module) -> list[Any]:
    return [
        each
        for each in model.modules()
        if type(each) in (nn.Embedding, nn.EmbeddingBag)
        and each.max_norm is not None
        and each.weight.requires_grad
    ]


def _scaled(rows: Tensor, limit: RowLimit) -> Tensor:
    """rows [*, d]. The gradient is that of the scaled rows."""
    values = rows.detach()
    norms = torch.linalg.vector_norm(values, limit.norm_type, -1, keepdim=True)
    return rows + values * (limit.scales(norms) - 1.0)


def _limit(module: Any) -> RowLimit:
    return RowLimit(rows=len(module.weight), largest=module.max_norm, norm_type=module.norm_type)


def _embedding(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    found = F.embedding(
        input, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
    )
    return _scaled(found, _limit(self))


def _bag(
    self: Any,
    input: Tensor,  # noqa: A002
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    return F.embedding_bag(
        input, _scaled(self.weight, _limit(self)), offsets, scale_grad_by_freq=self.scale_grad_by_freq, mode=self.mode, sparse=self.sparse,
        per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
    )  # fmt: skip

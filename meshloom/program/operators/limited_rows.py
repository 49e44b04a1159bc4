"""Embeddings with `max_norm`, without a write to their weight: rows that are longer are scaled where they are read.

torch scales the rows that a forward reads in the weight itself, and computes the gradient of the scaled rows:

    weight[rows] *= min(1, max_norm / norm);   result = weight[rows]        torch
    result = weight[rows] + constant(weight[rows] * (scale - 1))            here; the weight is scaled after the chunks

A row that was scaled is not scaled again, so chunks may do it in any order, and at the same time on several replicas.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
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


@contextmanager
def unlimited(model: nn.Module) -> Iterator[None]:
    """A context within that of `limited` in which they write to their weights, as torch has it."""
    changed = [(vars(each), vars(each)["forward"]) for each in _modules(model) if "forward" in vars(each)]
    for held, _ in changed:
        del held["forward"]
    try:
        yield
    finally:
        for held, forward in changed:
            held["forward"] = forward


@contextmanager
def functions_limited(tables: Mapping[int, Callable[[Tensor, int | None], None]] | None) -> Iterator[None]:
    """A context in which `F.embedding` and `F.embedding_bag` with `max_norm` write to none of these weights.

    tables: identities of weights -> what gets the rows that are looked up, and the row without gradient. None: all
    that are trained, while a loss is read.
    """
    functions: Any = F
    if not isinstance(functions.embedding, _Limited):
        functions.embedding = _Limited(functions.embedding, _limited_embedding)
        functions.embedding_bag = _Limited(functions.embedding_bag, _limited_bag)
    installed: list[_Limited] = [functions.embedding, functions.embedding_bag]
    for each in installed:
        each.tables.append(tables)
    try:
        yield
    finally:
        for each, name in zip(installed, ("embedding", "embedding_bag"), strict=True):
            each.tables = [other for other in each.tables if other is not tables]
            if not each.tables:
                setattr(functions, name, each.original)


class _Limited:
    """A lookup of torch's, which scales the rows of `tables` where it reads them. tables: of all contexts that are open;
    those of simulated ranks do not end in the order of their beginning."""

    def __init__(self, original: Callable[..., Tensor], limited: Callable[..., Tensor]) -> None:
        self.original, self._limited = original, limited
        functools.update_wrapper(self, original)  # torch tells modes which function is called by this name
        self.tables: list[Mapping[int, Callable[[Tensor, int | None], None]] | None] = []

    def __call__(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        """What torch returns."""
        names = _OF_BAGS if self._limited is _limited_bag else _OF_EMBEDDINGS
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("max_norm") is None or not isinstance(weight, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            return self.original(input, weight, *args, **kwargs)
        of_weight = [each[id(weight)] for each in self.tables if each is not None and id(weight) in each]
        if not of_weight and not (weight.requires_grad and None in self.tables):
            return self.original(input, weight, *args, **kwargs)
        for note in of_weight:
            note(input, given.get("padding_idx"))
        limit = RowLimit(
            rows=len(weight), largest=given.pop("max_norm"), norm_type=given.pop("norm_type", 2.0)
        )
        return self._limited(self.original, limit, input, weight, **given)


# the third argument and those after it
_OF_EMBEDDINGS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_OF_BAGS = (
    "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
    "include_last_offset", "padding_idx",
)  # fmt: skip


def _limited_embedding(
    original: Callable[..., Tensor],
    limit: RowLimit,
    index: Tensor,
    weight: Tensor,
    **options: Any,
) -> Tensor:
    return _scaled(original(index, weight, **options), limit)


def _limited_bag(
    original: Callable[..., Tensor],
    limit: RowLimit,
    index: Tensor,
    weight: Tensor,
    **options: Any,
) -> Tensor:
    return original(index, _scaled(weight, limit), **options)


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

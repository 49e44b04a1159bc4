"""Keyed draws of a forward that is several chunks of the plan: what each chunk has of every draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.random import KeyedDraws, digest_of_draw


class DrawsOfChunks(KeyedDraws):
    """Notes a digest of every chunk's rows of every draw. sizes: samples of the chunks, whose rows follow each other.

    of_chunks: the digests, chunk by chunk.

    >>> draws = DrawsOfChunks([1, 2])
    >>> with draws:
    ...     _ = torch.rand(3, 5)
    >>> [len(each) for each in draws.of_chunks]
    [1, 1]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes = sizes
        self.of_chunks: list[list[str]] = [[] for _ in sizes]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        drawn = super().__torch_dispatch__(func, types, args, dict(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not (kwargs or {}).get("generator"):
            start = 0
            for seen, size in zip(self.of_chunks, self._sizes, strict=True):
                seen.append(digest_of_draw(func, args, drawn, partial(self._rows, start=start, size=size)))
                start += size
        return drawn

    def _rows(self, drawn: Tensor, start: int, size: int) -> Tensor:
        total = sum(self._sizes)
        if not drawn.ndim or drawn.shape[0] % total:
            return drawn
        of_sample = drawn.shape[0] // total
        return drawn.narrow(0, start * of_sample, size * of_sample)


def draws_by_rows(model: nn.Module) -> bool:
    """Whether samples are the first dimension of whatever its modules draw: masks between recurrent layers have them in the second one."""
    return not any(
        isinstance(each, nn.RNNBase) and each.dropout and each.num_layers > 1 for each in model.modules()
    )

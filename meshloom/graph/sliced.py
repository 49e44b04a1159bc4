"""A random operator on a part of a value, whose draws are that part of the draws for all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from meshloom.graph.pieces import Pieces, Runs, place, take


@dataclass(frozen=True, kw_only=True)
class PartOfDraw:
    """`op` on this rank's part. sizes, held: of the tensor that is drawn inside, its whole dims (of those that are cut) and the runs held here."""

    op: Callable[..., Any]
    sizes: tuple[int, ...]
    held: tuple[Runs | None, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `op` gives, with every tensor that is drawn in it taken from one that is drawn whole."""
        with _Whole(self):
            return self.op(*args, **kwargs)

    def __str__(self) -> str:
        return f"part of {self.op}"

    def pieces(self, shape: Sequence[int]) -> Pieces | None:
        """This rank's part of the tensor whose part has `shape`; None if that is no part of what is drawn."""
        if len(shape) != len(self.held):
            return None
        counts = [sum(stop - start for start, stop in runs) if runs is not None else None for runs in self.held]
        if any(count is not None and count != size for count, size in zip(counts, shape, strict=True)):
            return None
        return Pieces(tuple(size if runs is None else whole for size, whole, runs in zip(shape, self.sizes, self.held, strict=True)), (self.held,))


class _Whole(TorchDispatchMode):
    def __init__(self, part: PartOfDraw) -> None:
        super().__init__()
        self.part = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func._schema.name.endswith("_"):  # draws into its first tensor
            pieces = self.part.pieces(args[0].shape)
            assert pieces is not None, f"{func} draws a tensor of {list(args[0].shape)}"
            whole = place(pieces, 0, args[0]).clone()
            func(whole, *tree_map(self._grown, args[1:]), **tree_map(self._grown, kwargs))
            return args[0].copy_(take(pieces, 0, whole))
        drawn = func(*(self._grown(each) for each in args), **{key: self._grown(each) for key, each in kwargs.items()})
        pieces = next(each for each in map(self._pieces, args) if each is not None)
        return tree_map(lambda each: take(pieces, 0, each).clone() if isinstance(each, Tensor) and tuple(each.shape) == pieces.shape else each, drawn)

    def _pieces(self, value: Any) -> Pieces | None:
        if isinstance(value, Tensor):
            return self.part.pieces(value.shape)
        return self.part.pieces(value) if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value) else None

    def _grown(self, value: Any) -> Any:
        pieces = self._pieces(value)
        if pieces is None:
            return value
        return place(pieces, 0, value) if isinstance(value, Tensor) else list(pieces.shape)

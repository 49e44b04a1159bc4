"""Random operators on a part of a value, whose draws are a slice of the draws for the full value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from meshloom.comm.pieces import Pieces, Runs, place, take
from meshloom.core.random import seed_torch
from meshloom.program.ir.draws import seed_of_draw


@dataclass(frozen=True, kw_only=True)
class PartOfDraw:
    """`op` on this rank's part.

    sizes, held: of the tensor that is drawn inside, its full sizes (of sharded dims) and the runs held here.
    stride: of the drawn tensor if it is like the operator's result: tensors are drawn in the order of memory.
    count: draws that the full operator counts; a kernel for another shape may draw a different number.
    """

    op: Callable[..., Any]
    sizes: tuple[int, ...]
    held: tuple[Runs | None, ...]
    count: int
    stride: tuple[int, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of `op`, with every drawn tensor sliced from a full one."""
        before = torch.default_generator.initial_seed()
        with _Whole(self):
            result = self.op(*args, **kwargs)
        seed_torch(seed_of_draw(before, self.count))
        return result

    def __str__(self) -> str:
        return f"part of {self.op}"

    def pieces(self, shape: Sequence[int]) -> Pieces | None:
        """The held part of a drawn tensor whose part has `shape`; None if no part of it has that shape."""
        if len(shape) != len(self.held):
            return None
        full: list[int] = []
        for size, whole, runs in zip(shape, self.sizes, self.held, strict=True):
            if runs is not None and sum(stop - start for start, stop in runs) != size:
                return None
            full.append(size if runs is None else whole)
        return Pieces(tuple(full), (self.held,))


class _Whole(TorchDispatchMode):
    def __init__(self, part: PartOfDraw) -> None:
        super().__init__()
        self.part = part

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func._schema.name.endswith("_"):  # draws into its first tensor
            pieces = self.part.pieces(args[0].shape)
            if pieces is None:
                return func(*args, **kwargs)
            whole = self._like_whole(pieces, args[0])
            whole.copy_(place(pieces, 0, args[0]))
            func(whole, *tree_map(self._grown, args[1:]), **tree_map(self._grown, kwargs))
            return args[0].copy_(take(pieces, 0, whole))
        drawn = func(*map(self._grown, args), **{key: self._grown(each) for key, each in kwargs.items()})
        pieces = next((each for each in map(self._pieces, args) if each is not None), None)
        if pieces is None:
            return drawn

        def part(each: Tensor) -> Tensor:
            return take(pieces, 0, each).clone() if tuple(each.shape) == pieces.shape else each

        return tree_map_only(Tensor, part, drawn)

    def _pieces(self, value: Any) -> Pieces | None:
        if isinstance(value, Tensor):
            return self.part.pieces(value.shape)
        is_shape = isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
        return self.part.pieces(value) if is_shape else None

    def _grown(self, value: Any) -> Any:
        pieces = self._pieces(value)
        if pieces is None:
            return value
        if not isinstance(value, Tensor):
            return list(pieces.shape)
        return self._like_whole(pieces, value).copy_(place(pieces, 0, value))

    def _like_whole(self, pieces: Pieces, part: Tensor) -> Tensor:
        stride = self.part.stride
        if stride is None or len(stride) != part.ndim:
            return part.new_empty(pieces.shape)
        return torch.empty_strided(pieces.shape, stride, dtype=part.dtype, device=part.device)

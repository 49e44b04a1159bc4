"""Watches which dims of a module's parameters matrix products sum over, and which they keep, while the module runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# operator -> its two factors, and the dims of each that are kept and summed over
_FACTORS = {
    "mm": ((0, 0, 1), (1, 1, 0)),
    "addmm": ((1, 0, 1), (2, 1, 0)),
    "bmm": ((0, 1, 2), (1, 2, 1)),
    "baddbmm": ((1, 1, 2), (2, 2, 1)),
    "mv": ((0, 0, 1),),
}


class ProductDims(TorchDispatchMode):
    """kept, summed: number of a tensor -> its dims. A tensor that is no factor of a product, through views alone, is in neither."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.kept: dict[int, set[int]] = {}
        self.summed: dict[int, set[int]] = {}
        self._tensors = tensors
        self._numbers: dict[
            int, list[int]
        ] = {}  # alike parameters may share memory while a program is compared
        for number, each in enumerate(tensors):
            if each.layout == torch.strided:
                self._numbers.setdefault(each.untyped_storage().data_ptr(), []).append(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for factor, kept, summed in _FACTORS.get(func.overloadpacket.__name__, ()):
            view = args[factor]
            if view.layout != torch.strided:
                continue
            for number in self._numbers.get(view.untyped_storage().data_ptr(), ()):
                self._note(self.kept, number, view.stride(kept))
                self._note(self.summed, number, view.stride(summed))
        return func(*args, **(kwargs or {}))

    def _note(self, noted: dict[int, set[int]], number: int, stride: int) -> None:
        tensor = self._tensors[number]
        dims = [dim for dim in range(tensor.ndim) if tensor.size(dim) > 1 and tensor.stride(dim) == stride]
        noted.setdefault(number, set()).update(dims)

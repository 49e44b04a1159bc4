"""Bytes that autograd saves for backward, counted while a rank computes."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


class SavedBytes:
    """Counts what is saved for backward while it is entered, each memory once, in the thread that entered it.

    given: tensors that exist anyway, parameters and buffers. most: the most bytes at one time.

    >>> x, w = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    >>> with SavedBytes([w]) as kept:
    ...     (x * w).sum().backward()
    >>> kept.most
    32
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.most = 0
        self._now = 0
        self._times: dict[int, int] = {}  # address of the memory -> how often it is saved
        self._given = {each.untyped_storage().data_ptr() for each in given}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, where)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if isinstance(tensor, FakeTensor | FunctionalTensor):  # of a capture in between
            return tensor
        address = tensor.untyped_storage().data_ptr()
        return tensor if address in self._given or not address else _Saved(tensor, self)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def add(self, tensor: Tensor, sign: int) -> None:
        """It is saved once more, or once less."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        times = self._times.get(address, 0)
        self._times[address] = times + sign
        if (times, sign) in ((0, 1), (1, -1)):
            self._now += sign * storage.nbytes()
            self.most = max(self.most, self._now)


class _Saved:
    """One saved tensor."""

    def __init__(self, tensor: Tensor, kept: SavedBytes) -> None:
        self.tensor = tensor
        self._kept = kept
        kept.add(tensor, 1)

    def __del__(self) -> None:
        self._kept.add(self.tensor, -1)

"""Buffers that are not persistent: a model's `state_dict` leaves them out, so that a resumed run begins with them as they are built."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshloom.parameters.digest import digest


class UnsavedBuffers:
    """Those of `model`, and which of them hold other values than before the first chunk.

    any: whether the model was built with some, in this stage or another; equal on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.any = any(vars(module)["_non_persistent_buffers_set"] for module in model.modules())
        self._first: dict[str, tuple[Tensor, int, Tensor]] | None = (
            None  # with the write counter and a digest
        )

    def begin(self) -> None:
        """Before each chunk."""
        if self._first is None:
            self._first = {name: (each, each._version, digest(each)) for name, each in _unsaved(self._model)}  # pyright: ignore[reportPrivateUsage]

    def changed(self) -> list[str]:
        """The names of those that hold other values now."""
        first = self._first or {}
        return [name for name, each in _unsaved(self._model) if name in first and _has_changed(each, *first[name])]  # fmt: skip


def _has_changed(now: Tensor, tensor: Tensor, version: int, before: Tensor) -> bool:
    if now is tensor and now._version == version:  # pyright: ignore[reportPrivateUsage]
        return False
    return (now.shape, now.dtype) != (tensor.shape, tensor.dtype) or bool(digest(now) != before)


def _unsaved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        unsaved = vars(module)["_non_persistent_buffers_set"]
        for name, tensor in module.named_buffers(recurse=False) if unsaved else ():
            plain = tensor.layout == torch.strided and not tensor.is_quantized
            if name in unsaved and plain and not tensor.is_meta:
                yield f"{path}.{name}".removeprefix("."), tensor

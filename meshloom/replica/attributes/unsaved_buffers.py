"""Buffers that are not persistent: a model's `state_dict` leaves them out, so that a resumed run begins with them as they are built."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_MOST_BYTES = 2**26  # of a buffer whose values are compared; a larger one has changed if it was written


class UnsavedBuffers:
    """Those of `model`, and which of them hold other values than before the first chunk.

    any: whether the model was built with some, in this stage or another; equal on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.any = any(vars(module)["_non_persistent_buffers_set"] for module in model.modules())
        self._first: dict[str, tuple[Tensor, int, str]] | None = None  # with the write counter and a digest

    def begin(self) -> None:
        """Before each chunk."""
        if self._first is None:
            self._first = {name: (each, each._version, _digest(each)) for name, each in _unsaved(self._model)}  # pyright: ignore[reportPrivateUsage]

    def changed(self) -> list[str]:
        """The names of those that hold other values now."""
        first = self._first or {}
        return [name for name, each in _unsaved(self._model) if name in first and _has_changed(each, *first[name])]  # fmt: skip


def _has_changed(now: Tensor, tensor: Tensor, version: int, digest: str) -> bool:
    untouched = now is tensor and now._version == version  # pyright: ignore[reportPrivateUsage]
    return not untouched and (not digest or _digest(now) != digest)


def _unsaved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        unsaved = vars(module)["_non_persistent_buffers_set"]
        for name, tensor in module.named_buffers(recurse=False) if unsaved else ():
            plain = tensor.layout == torch.strided and not tensor.is_quantized
            if name in unsaved and plain and not tensor.is_meta:
                yield f"{path}.{name}".removeprefix("."), tensor


def _digest(tensor: Tensor) -> str:
    """Of its shape, dtype and bytes; "" if it is too large."""
    if tensor.nbytes > _MOST_BYTES:
        return ""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
    found = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

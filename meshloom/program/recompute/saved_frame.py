"""The shared state of the handles of one run of a segment, which is recomputed once for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshloom.core.errors import CaptureError


class Elsewhere(Protocol):
    """What has the values of parameters that a rank does not keep (zero=3)."""

    def pack(self, tensor: Tensor) -> Any:
        """What is kept of a tensor that autograd saves: itself or, if its memory is a parameter's, something
        whose method `tensor` returns it."""
        ...

    def watching(self) -> AbstractContextManager[Any]:
        """Context in which operators find values in the parameters that they get."""
        ...


def is_elsewhere(kept: Any) -> bool:
    """Whether `Elsewhere.pack` has returned something else than the tensor."""
    return not isinstance(kept, Tensor)


class Frame:
    """One run of a segment. It lives as long as one of its handles does.

    again: for every saved tensor, in order, whether it is recomputed. compute: from held values and a seed,
        the recomputed tensors by number. elsewhere: has the values of parameters, which are not counted.
    """

    def __init__(
        self,
        again: Sequence[bool],
        compute: Callable[[Sequence[Any], int | None], Mapping[int, Tensor]],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._again, self._compute, self._elsewhere = again, compute, elsewhere
        self._count = 0
        self._handles: dict[int, weakref.ref[Handle]] = {}
        self._held: list[Any] = []
        self._seed: int | None = None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor that it saves."""
        if self._elsewhere and is_elsewhere(kept := self._elsewhere.pack(tensor)):
            return kept
        number = self._count
        self._count = number + 1
        if number >= len(self._again) or not self._again[number]:
            return tensor
        handle = Handle(self, None)
        self._handles[number] = weakref.ref(handle)
        return handle

    def take_over(self, handles: Sequence[weakref.ref[Handle]]) -> None:
        """After a first run: handles that are recomputed drop their tensors."""
        self._count = len(handles)
        for number, reference in enumerate(handles):
            if self._again[number] and (handle := reference()) is not None:
                handle.frame, handle.tensor = self, None
                self._handles[number] = reference

    def close(self, seed: int | None, given: Sequence[Any], made: Sequence[Any]) -> None:
        """After the segment has run: hold the inputs of the recomputation, detached from autograd's graph.
        seed: before the first draw."""
        if self._count != len(self._again):
            raise CaptureError(
                f"Operators saved {self._count} tensors for the backward, and {len(self._again)} when they ran first, so they cannot be recomputed. "
                "Use recompute=none."
            )
        self._seed = seed
        self._held = [tree_map_only(Tensor, _detached, each) for each in (*given, *made)]

    def compute(self) -> None:
        """Recompute, and fill every handle."""
        held, self._held = self._held, []
        found = self._compute(held, self._seed)
        for number, reference in self._handles.items():
            if (handle := reference()) is not None:
                handle.tensor = found[number]


class Handle:
    """Stands for a saved tensor. It is freed when autograd frees it, and the tensor with it."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: Frame | None, tensor: Tensor | None) -> None:
        self.frame = frame
        self.tensor = tensor


def open_saved(held: Any) -> Tensor:
    """The saved tensor of a handle, of what is elsewhere, or of itself."""
    if not isinstance(held, Handle):
        return held.tensor() if is_elsewhere(held) else held
    if held.tensor is None:
        assert held.frame is not None
        held.frame.compute()
        assert held.tensor is not None
    return held.tensor


def _detached(tensor: Tensor) -> Tensor:
    """The same memory, outside of the graph. Parameters stay themselves, as autocast caches their casts."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)

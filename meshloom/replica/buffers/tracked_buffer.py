"""A buffer that a training forward may change, and what one chunk made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.program.ir.written_parameters import tensors_beside
from meshloom.replica.buffers.recurrence import same


@dataclass
class TrackedBuffer:
    """A buffer, or a parameter that counts as one. start: before the step. last: it is no recurrence. group: lowest
    number of its tied ones. latest: what the last chunk made of it that changed it. reshaped: whether some chunk gave
    it another shape."""

    number: int
    name: str
    module: nn.Module
    key: str
    original: Tensor  # the object; a forward may put another in its place
    start: Tensor
    group: int
    version: int = 0  # of `original`, when it had the value `start`
    moved: bool = False  # in some step
    changed: bool = False  # in this one
    latest: Tensor | None = None
    reshaped: bool = False
    last: bool = False
    read: bool = False
    factor: Tensor | None = None  # a [numel], where `known`
    known: Tensor | None = None
    is_sure: bool = False  # every chunk changes it, as a program says
    chunks: int = 0  # that changed it since its factor is known
    varies: bool = False  # the factor differs between chunks

    def now(self) -> Tensor | None:
        return tensors_beside(self.module, self.key).get(self.key)

    def put(self, value: Tensor) -> None:
        place = tensors_beside(self.module, self.key)
        if not isinstance(self.original, nn.Parameter):
            place[self.key] = value
        elif value is not self.original:  # others may refer to it (a recurrent layer's list of weights)
            with torch.no_grad():
                self.original.copy_(value)

    def put_back(self) -> None:
        """The object and the value that it had before the step."""
        if self.original.shape != self.start.shape:  # it was resized in place
            self.original = self.start.clone()
        elif not same(self.original, self.start):
            with torch.no_grad():
                self.original.copy_(self.start)
        self.put(self.original)
        self.version = self.original._version  # pyright: ignore[reportPrivateUsage]


@dataclass
class ChunkEnds:
    """What a chunk made of the buffers that it changed, and where [numel]; factors [numel] of elements that it did not
    change; its own factors [numel], where they have been found. rerun: runs it once more."""

    rerun: Callable[[], Any] | None
    ends: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    where: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    untouched: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    factors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def fits(now: Tensor, buffer: TrackedBuffer) -> bool:
    """Whether a value has the shape and dtype that the buffer had before the step."""
    return now.shape == buffer.start.shape and now.dtype == buffer.start.dtype


def num_reals(value: Tensor) -> int:
    """Real numbers in a value."""
    return value.numel() * (2 if value.is_complex() else 1)

"""The contract of a group: collectives and point-to-point messages of a set of ranks.

Every call starts an operation and returns a `Work`. Before `wait()` has returned, outputs may not be read and
inputs may not be changed. Operations of one group run first in, first out. All ranks start the same
operations in the same order, across groups too. Ranks are numbered within the group, from 0 to size - 1.
Tensors are dense and contiguous, on the group's device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

ReduceOp = Literal["sum", "avg", "max", "min"]


class Work(ABC):
    """A started operation."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the outputs may be read (on GPUs: by kernels that are enqueued from now on)."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether `wait` would return, or raise, immediately. Does not wait."""


class Group(ABC):
    """A set of ranks that communicate. Any call and any wait raises `PeerLostError` if one of them is lost.

    An example that runs is `simulated_groups` (`comm/simulated.py`).

    rank: this rank's number within the group. size: number of ranks in the group.
    secret: the key with which its ranks sign what they send over a network; b"": none, or no network.
    is_in_place: whether rank r may pass slice r of the full tensor as `output` of `reduce_scatter`, which then
        overwrites the other slices, and as `tensor` of `all_gather`.
    has_streams: whether operations run on streams of their own, so that a wait orders the stream that is current, and no other.
    """

    rank: int
    size: int
    secret = b""
    is_in_place = False
    has_streams = False

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Replace `tensor` (of equal shape on all ranks) by its reduction, with equal bits on all ranks."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Fill rank r's `output` [n] with the reduction of slice r of every rank's `tensor` [size * n]."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output` [size * n] with the `tensor` [n] of every rank, in rank order. `tensor` may be a
        slice of `output` only if `is_in_place`."""

    @abstractmethod
    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        """Send the next `sizes[r]` elements of flat `tensor` to rank r, for each r in order; receive
        `output_sizes[r]` elements from rank r into flat `output`."""

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        """Fill `outputs[r]` of rank `destination` with rank r's `tensor`, of its shape; others pass None."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with that of rank `source`; shapes are equal."""

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> Work:
        """Send `tensor` to a rank, which calls `recv` with its shape and dtype; messages keep their order."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with the next one that rank `source` sends."""

    @abstractmethod
    def barrier(self) -> Work:
        """Finished once every rank has started its barrier."""

    @abstractmethod
    def abort(self) -> None:
        """Fail all operations under way, here and on the other ranks, with `PeerLostError`."""

"""The contract of a group: how a set of ranks talk.

Every call starts an operation and returns a `Work`; nothing may be read from an output, nor an input be
changed, before
`wait()`. Operations of one group are numbered as they start and run first in, first out; every rank starts
the same
operations in the same order, and across groups too. Ranks are numbered within the group, 0 to size - 1.
Tensors are
dense and contiguous, on the group's device. "bytes" in reports are those of the tensor that a rank hands in.
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
        """Return when the outputs may be read (on GPUs: by work enqueued from now on)."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the operation is over, so that `wait` would return at once; never waits."""


class Group(ABC):
    """A set of ranks that talk to each other. Raises `PeerLostError` when one of them goes away."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    @abstractmethod
    def secret(self) -> bytes:
        """What its ranks know and the network between them does not, to sign with; b"": nothing, or there is
        no network."""

    @property
    def is_in_place(self) -> bool:
        """Whether slice r of the whole tensor may be rank r's output of `reduce_scatter`, which then leaves
        nothing in the others, and its part in `all_gather`."""
        return False

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Replace `tensor` (any shape, the same on all ranks) by its reduction over the ranks, bit-identical
        on all."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Rank r's `output` [n] becomes the reduction of slice r of every rank's `tensor` [size * n]."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """`output` [size * n] becomes all ranks' `tensor` [n], in rank order. `tensor` may be a part of
        `output` only if `is_in_place`."""

    @abstractmethod
    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        """Send `sizes[r]` elements of flat `tensor`, in order, to rank r; receive `output_sizes[r]` from rank
        r into flat `output`."""

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        """On rank `destination`, `outputs[r]` becomes rank r's `tensor`; the others pass None. Shapes are
        equal."""

    @abstractmethod
    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        """`output` becomes `tensors[rank]` of rank `source`; the others pass None. Shapes are equal."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Replace `tensor` by rank `source`'s."""

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> Work:
        """Send to a rank, which must call `recv` with the same shape and dtype. In order per pair of
        ranks."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with what rank `source` sent."""

    @abstractmethod
    def barrier(self) -> Work:
        """Wait returns once every rank has started its barrier."""

    @abstractmethod
    def abort(self) -> None:
        """Leave at once: operations under way fail here and on the other ranks."""

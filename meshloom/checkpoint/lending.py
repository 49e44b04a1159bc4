"""The contract of state that a save reads where it is, uncopied, while updates write elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor


class Lender(ABC):
    """State of one rank on a disk."""

    @property
    @abstractmethod
    def directory(self) -> Path:
        """In which it is."""

    @abstractmethod
    def lends(self, tensor: Tensor) -> bool:
        """Whether a tensor, or a part of one, is there and can be lent."""

    @abstractmethod
    def missing_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of the disk, beside those that are reserved, for what updates write while these are lent."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> None:
        """Reserves so much of the disk. Raises `PlanError` if it is not there."""

    @abstractmethod
    def take_back(self) -> None:
        """Undoes the newest `reserve`, before anything was lent since."""

    @abstractmethod
    def lend(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Flat tensors of the same elements, to which nothing is written until `end`. One loan at a time."""

    @abstractmethod
    def let_go(self, tensor: Tensor) -> None:
        """Called when elements of one have been read: its pages need not stay in memory."""

    @abstractmethod
    def end(self) -> None:
        """Called when nobody reads what was lent any more, by any thread."""

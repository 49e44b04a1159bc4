"""What a rank has of a tensor of which the ranks of a group have parts: here the range along one dim."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.errors import MeshloomError


class PartError(MeshloomError, RuntimeError):
    """What needs more of a parameter than the part that this rank has."""


class TensorPlace(ABC):
    """name: of the tensor. shape: of the whole. group: the ranks that have parts. own_shape: of this rank's. own_start: where a part that is a box begins in the
    whole, along each dim."""

    name: str
    shape: torch.Size
    group: Group

    @property
    @abstractmethod
    def own_shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def own_start(self) -> tuple[int, ...]: ...

    @abstractmethod
    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole's shape; perhaps a view."""

    @abstractmethod
    def own_of(self, other: Tensor) -> Tensor:
        """Of a tensor that can be broadcast to the whole: what belongs to this rank's part."""

    @abstractmethod
    def is_as(self, other: TensorPlace) -> bool:
        """Whether the elements of its parts stand in the same places."""

    @abstractmethod
    def whole_of(self, part: Tensor) -> Tensor:
        """All of it on every rank of the group, which call this together. part: plain, of this rank."""

    def counted(self, part: Tensor) -> Tensor:
        """The elements of this rank's part that it counts in a number of the whole, of which each is counted once."""
        return part

    @property
    def rows(self) -> PartPlace | None:
        """Where replicas divide what each would have: which of them has what of it."""
        return None

    @abstractmethod
    def refusal(self, what: str) -> PartError:
        """The error that says that this needs more than a part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartPlace(TensorPlace):
    """sizes: along `dim`, of the part of each rank of `group`; a part may be empty."""

    name: str
    shape: torch.Size
    dim: int
    sizes: tuple[int, ...]
    group: Group

    def __post_init__(self) -> None:
        if len(self.sizes) != self.group.size or sum(self.sizes) != self.shape[self.dim]:
            raise PartError(
                f"{self.name} of shape {tuple(self.shape)} has no parts of {self.sizes} along {self.dim}."
            )

    @cached_property
    def own_shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.shape_of(self.group.rank)

    @property
    def rows(self) -> PartPlace:
        return self

    def start(self, rank: int) -> int:
        return sum(self.sizes[:rank])

    @cached_property
    def own_start(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(self.start(self.group.rank) * (dim == self.dim) for dim in range(len(self.shape)))

    def shape_of(self, rank: int) -> torch.Size:
        """The part's shape."""
        return torch.Size((*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :]))

    def part_of(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor of the whole's shape, a view."""
        return whole.narrow(self.dim, self.start(rank), self.sizes[rank])

    def own_part(self, whole: Tensor) -> Tensor:
        return self.part_of(whole, self.group.rank)

    def whole_of(self, part: Tensor) -> Tensor:
        from meshloom.loops.flat_parts import gathered

        return gathered([part], [self])[0]

    def own_of(self, other: Tensor) -> Tensor:
        dim = other.dim() - (len(self.shape) - self.dim)
        if other.shape == self.own_shape or dim < 0 or other.size(dim) == 1:
            return other
        if other.size(dim) != self.shape[self.dim] or other.dim() > len(self.shape):
            raise PartError(
                f"A tensor of shape {tuple(other.shape)} cannot be broadcast to {self.name} of shape {tuple(self.shape)}."
            )
        return other.narrow(dim, self.start(self.group.rank), self.sizes[self.group.rank])

    def is_as(self, other: TensorPlace) -> bool:
        if not isinstance(other, PartPlace):
            return False
        same = (self.shape, self.dim, self.sizes) == (other.shape, other.dim, other.sizes)
        return self.group is other.group and same

    def refusal(self, what: str) -> PartError:
        size, start = self.sizes[self.group.rank], self.start(self.group.rank)
        has = f"{start} to {start + size - 1}" if size else "none"
        along = "rows" if self.dim == 0 else f"along dim {self.dim}"
        return refusal_of(f"{what} of {self.name}: this rank has {along} {has} of {self.shape[self.dim]}.")


def refusal_of(text: str) -> PartError:
    """With the ways out."""
    return PartError(
        f"{text} ml.whole(parameter) is all of it, with ml.whole(model): all of the model, and ml.save(...) writes it."
    )

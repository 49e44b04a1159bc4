"""The grid of ranks: its three axes, and the groups of ranks along each.

    rank = (pp * size_dp + dp) * size_tp + tp

Ranks of a tensor-parallel group, which communicate most, are neighbours; stages of a pipeline, which
communicate least, are farthest apart. `Mesh(dp=2, pp=2, tp=2)`:

              dp=0      dp=1
    pp=0      0  1      2  3       (left and right: tp=0, tp=1)
    pp=1      4  5      6  7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshloom.core.errors import PlanError

Axis = Literal["dp", "pp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True)
class MeshCoordinates:
    """A rank's coordinates on the mesh.

    >>> print(MeshCoordinates(dp=3))
    dp=3
    """

    dp: int = 0
    pp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return ",".join(
            f"{axis}={getattr(self, axis)}" for axis in AXES if axis == "dp" or getattr(self, axis)
        )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the three axes. Raises `PlanError` for a size below 1.

    within: consecutive replicas that keep slices of the same copy (zero_within); 0: all of them.

    >>> mesh = Mesh(dp=2, pp=2, tp=2)
    >>> mesh.size, mesh.place(6), mesh.rank(MeshCoordinates(dp=1, pp=1, tp=0))
    (8, MeshCoordinates(dp=1, pp=1, tp=0), 6)
    >>> mesh.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    within: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(f"{axis}={size!r} is not a size. Give a whole number of ranks, 1 or more.")
        assert not self.within or self.dp % self.within == 0, f"dp={self.dp} in groups of {self.within}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def num_slices(self) -> int:
        """The slices of a copy along dp, where replicas keep slices."""
        return self.within or self.dp

    def place(self, rank: int) -> MeshCoordinates:
        """Coordinates of `rank`."""
        self._check(rank)
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return MeshCoordinates(dp=dp, pp=pp, tp=tp)

    def rank(self, place: MeshCoordinates) -> int:
        """Rank at `place`, the inverse of `place(rank)`."""
        for axis in AXES:
            if not 0 <= getattr(place, axis) < getattr(self, axis):
                raise PlanError(f"There is no place {place} on a mesh with {axis}={getattr(self, axis)}.")
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` alone, itself included, in order of the axis."""
        here = self.place(rank)
        coordinates = {name: getattr(here, name) for name in AXES}
        return tuple(
            self.rank(MeshCoordinates(**{**coordinates, axis: index})) for index in range(getattr(self, axis))
        )

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, in order of their first rank."""
        return tuple(
            self.group_of(axis, rank) for rank in range(self.size) if getattr(self.place(rank), axis) == 0
        )

    def slice_groups(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Along dp, the ranks that keep slices of one copy; and those that keep the same slices.

        >>> Mesh(dp=6, within=3).slice_groups()
        (((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5)))
        """
        size = self.num_slices
        rows = self.groups("dp")
        of_copies = tuple(row[at : at + size] for row in rows for at in range(0, self.dp, size))
        of_slices = tuple(row[at::size] for row in rows for at in range(size))
        return of_copies, of_slices

    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, in order of pp, then of tp.

        >>> Mesh(dp=2, pp=2, tp=1).teams()
        ((0, 2), (1, 3))
        """
        places = [self.place(rank) for rank in range(self.size)]  # in order of pp, then of dp, then of tp
        return tuple(
            tuple(rank for rank, place in enumerate(places) if place.dp == replica)
            for replica in range(self.dp)
        )

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise PlanError(f"There is no rank {rank} on a mesh of {self.size} ranks (0 to {self.size - 1}).")

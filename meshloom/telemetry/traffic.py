"""Bytes that a rank hands to collectives and messages: as counted, and as formulas say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from meshloom.comm.recording import Count


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank handed to each kind of operation, by axis.

    >>> Traffic.along("dp", all_reduce=8) * 3 + Traffic.along("tp", all_gather=16)
    Traffic(bytes={'dp': {'all_reduce': 24}, 'tp': {'all_gather': 16}})
    """

    bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])

    @staticmethod
    def along(axis: str, **kinds: int) -> Traffic:
        """Bytes along one axis, by kind of operation."""
        return Traffic({axis: kinds})

    @staticmethod
    def of(counts: Mapping[str, Mapping[str, Count]]) -> Traffic:
        """The bytes in counts of operations by axis and kind."""
        found = {axis: {name: each.bytes for name, each in kinds.items()} for axis, kinds in counts.items()}
        return Traffic(found).over(found)

    def __add__(self, other: Traffic) -> Traffic:
        axes = dict.fromkeys((*self.bytes, *other.bytes))
        both = {axis: (self.bytes.get(axis, {}), other.bytes.get(axis, {})) for axis in axes}
        return Traffic({axis: dict(Counter(one) + Counter(two)) for axis, (one, two) in both.items()})

    def __mul__(self, times: int) -> Traffic:
        return Traffic(
            {axis: {kind: size * times for kind, size in kinds.items()} for axis, kinds in self.bytes.items()}
        )

    def over(self, axes: Collection[str]) -> Traffic:
        """That along `axes` alone, with an entry for each of them."""
        return Traffic(
            {axis: {kind: size for kind, size in self.bytes.get(axis, {}).items() if size} for axis in axes}
        )

    def total(self, axis: str) -> int:
        """Bytes along an axis."""
        return sum(self.bytes.get(axis, {}).values())


@dataclass(frozen=True, kw_only=True)
class ExpectedBytes:
    """What one component of a rank should hand over, as formulas say. Components add up.

    once: at the start and in the first step. per_step, per_check (of whether replicas are identical) and
        per_evaluation: each time.
    so_far: in all, of what the formulas know only as the run goes on: shapes of batches, rows in use, rounds
        of local steps, the optimizer's state that replicas average.
    """

    once: Traffic = Traffic()
    per_step: Traffic = Traffic()
    per_check: Traffic = Traffic()
    per_evaluation: Traffic = Traffic()
    so_far: Traffic = Traffic()

    def __add__(self, other: ExpectedBytes) -> ExpectedBytes:
        return ExpectedBytes(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )

    def after(self, *, steps: int = 0, checks: int = 0, evaluations: int = 0) -> Traffic:
        """All that has been handed over after so many of each.

        >>> loss = ExpectedBytes(per_step=Traffic.along("dp", all_reduce=40))
        >>> start = ExpectedBytes(once=Traffic.along("dp", broadcast=1000))
        >>> (loss + start).after(steps=3)
        Traffic(bytes={'dp': {'broadcast': 1000, 'all_reduce': 120}})
        """
        each_time = self.per_step * steps + self.per_check * checks + self.per_evaluation * evaluations
        return self.once + each_time + self.so_far

"""The shares of the replicas in the batch of each step: readers look them up, measurements change them.

record   [(40, (5, 5, 5, 1)), (90, (4, 4, 4, 4))]      steps 0 to 39: the plan's; 40 to 89: 5 + 5 + 5 + 1; ...
"""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan

# (first step, counted from 0; shares from that step on), in order of steps
Record = Sequence[tuple[int, Sequence[int]]]


class Shares:
    """The shares of one run under `plan`. record: of an earlier run, to repeat its shares.

    Raises `PlanError` for an invalid record, or one of another plan.
    """

    def __init__(self, plan: Plan, record: Record = ()) -> None:
        self._plan = plan
        self._record: list[tuple[int, tuple[int, ...]]] = []
        self._last_looked_up = -1  # the last step whose shares were looked up
        if record and plan.shares != "measured":
            raise PlanError(
                f"Recorded shares are for a plan with shares=measured, and this one has shares={plan.shares}. Leave the record out."
            )
        self.add_record(record)

    def add_record(self, record: Record) -> None:
        """Add the changes before a checkpoint."""
        for step, shares in record:
            self._add(step, tuple(shares))

    @property
    def record(self) -> list[tuple[int, tuple[int, ...]]]:
        """All changes, future ones included."""
        return list(self._record)

    @property
    def first_free(self) -> int:
        """The first step whose shares were not looked up on this rank, so that they can still change."""
        return self._last_looked_up + 1

    def of(self, step: int) -> tuple[int, ...]:
        """The relative shares of `step`; empty: the plan's."""
        self._last_looked_up = max(self._last_looked_up, step)
        return next((shares for first, shares in reversed(self._record) if first <= step), ())

    def sizes(self, step: int, num_samples: int) -> list[int]:
        """Samples of each replica in a batch of `num_samples`."""
        sizes, m = self._plan.sizes(num_samples, self.of(step)), self._plan.microbatches
        return [sum(sizes[start : start + m]) for start in range(0, len(sizes), m)]

    def change(self, step: int, shares: Sequence[int]) -> None:
        """Set the shares from `step` on, which must not have been looked up."""
        assert step >= self.first_free, (
            f"the shares of step {step} are to change, and those of step {self._last_looked_up} were looked up already"
        )
        self._add(step, tuple(shares))

    def _add(self, step: int, shares: tuple[int, ...]) -> None:
        known = f"Recorded shares {'+'.join(map(str, shares))} from step {step}"
        if len(shares) != self._plan.dp:
            raise PlanError(
                f"{known} are for {len(shares)} replicas, and dp={self._plan.dp}. Use dp={len(shares)}, or leave the record out."
            )
        if not any(shares) or any(share < 0 for share in shares):
            raise PlanError(f"{known} are not valid: give 0 or more to each replica, and more than 0 to one.")
        if self._record and step <= self._record[-1][0]:
            raise PlanError(
                f"{known} come after those from step {self._record[-1][0]}. Give them in the order of steps."
            )
        self._record.append((step, shares))

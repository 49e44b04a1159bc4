"""The shares that replicas have of the batch of each step: readers look them up, measurements add to them.

record   [(40, (5, 5, 5, 1)), (90, (4, 4, 4, 4))]      steps 0 to 39: as the plan says; 40 to 89: 5 + 5 + 5 + 1; ...
"""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan

# first step (counted from 0) and shares from there on, in order of steps
Record = Sequence[tuple[int, Sequence[int]]]


class Shares:
    """Of one run under `plan`. record: of an earlier run, to be had again.

    Raises `PlanError` for a record that is none, or not one of this plan.
    """

    def __init__(self, plan: Plan, record: Record = ()) -> None:
        self._plan = plan
        self._record: list[tuple[int, tuple[int, ...]]] = []
        self._asked = -1  # the last step whose shares somebody knows
        if record and plan.shares != "measured":
            raise PlanError(
                f"Recorded shares are for a plan with shares=measured, and this one has shares={plan.shares}. Leave the record out."
            )
        self.go_on(record)

    def go_on(self, record: Record) -> None:
        """Add those of the part before a checkpoint."""
        for step, shares in record:
            self._add(step, tuple(shares))

    @property
    def record(self) -> list[tuple[int, tuple[int, ...]]]:
        """All changes so far, those that are still to come included."""
        return list(self._record)

    @property
    def first_free(self) -> int:
        """The first step whose shares nobody has looked up here: they can still change."""
        return self._asked + 1

    def of(self, step: int) -> tuple[int, ...]:
        """The shares of `step`, relative; none if they are the plan's own."""
        self._asked = max(self._asked, step)
        return next((shares for first, shares in reversed(self._record) if first <= step), ())

    def sizes(self, step: int, num_samples: int) -> list[int]:
        """Samples of each replica in a batch of `num_samples`."""
        sizes, m = self._plan.sizes(num_samples, self.of(step)), self._plan.microbatches
        return [sum(sizes[start : start + m]) for start in range(0, len(sizes), m)]

    def change(self, step: int, shares: Sequence[int]) -> None:
        """From `step` on, which is free, replicas have these shares."""
        assert step >= self.first_free, (
            f"the shares of step {step} are to change, and those of step {self._asked} were looked up already"
        )
        self._add(step, tuple(shares))

    def _add(self, step: int, shares: tuple[int, ...]) -> None:
        known = f"Recorded shares {'+'.join(map(str, shares))} from step {step}"
        if len(shares) != self._plan.dp:
            raise PlanError(
                f"{known} are for {len(shares)} replicas, and dp={self._plan.dp}. Use dp={len(shares)}, or leave the record out."
            )
        if not any(shares) or any(share < 0 for share in shares):
            raise PlanError(f"{known} are no shares: give 0 or more to each replica, and something to one.")
        if self._record and step <= self._record[-1][0]:
            raise PlanError(
                f"{known} come after those from step {self._record[-1][0]}. Give them in the order of steps."
            )
        self._record.append((step, shares))

"""The smallest plan that differs from one device as a plan does: which of its settings it takes.

Settings are left out or lowered one at a time, as one would by hand, and what still differs goes on without them, until none can be left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshloom.core.errors import PlanError
from meshloom.core.plan import DEFAULTS, Plan

_AXES = ("tp", "pp", "dp")  # come last: other settings need them
_COUNTS = (*_AXES, "microbatches", "zero")  # also lowered without being left out


@dataclass(frozen=True, kw_only=True)
class SmallestPlan:
    """plan: differs, as the text of a plan. equal: plans with one setting less, which do not. failed: those that end with an error.
    runs: how many plans were verified for it."""

    plan: str
    equal: tuple[str, ...]
    failed: tuple[str, ...]
    runs: int

    @property
    def sentence(self) -> str:
        """One sentence or two: the plan, and what was ruled out."""
        said = f"the smallest plan that differs: {self.plan}"
        if self.plan == str(Plan()):
            return f"{said}. So no setting of the plan is the reason, but what every run does, such as reading data, seeding and updating"
        verb = "are" if len(self.equal) > 1 else "is"
        equal = [f"{_listed(self.equal)} {verb} equal"] if self.equal else []
        failed = [f"{_listed(self.failed)} ended with an error"] if self.failed else []
        return f"{said}; {', and '.join([*equal, *failed])} ({self.runs} plans verified)"


def smallest_plan(plan: Plan, differs: Callable[[Plan], bool | None]) -> SmallestPlan:
    """plan: one that differs. differs: whether another does; None: it ended with an error."""
    known = cache(differs)
    while (smaller := next(filter(known, plans_below(plan)), None)) is not None:
        plan = smaller
    below = [*plans_below(plan)]
    return SmallestPlan(
        plan=str(plan), equal=tuple(str(each) for each in below if known(each) is False),
        failed=tuple(str(each) for each in below if known(each) is None), runs=known.cache_info().currsize
    )  # fmt: skip


def plans_below(plan: Plan) -> Iterator[Plan]:
    """Those that have one setting less, or a lower number; of each setting the lowest first.

    >>> [str(each) for each in plans_below(Plan(dp=4, zero=2, keyed_draws=True))]
    ['dp=4,keyed_draws=true', 'dp=4,zero=1,keyed_draws=true', 'dp=4,zero=2', 'dp=1,zero=2,keyed_draws=true', 'dp=2,zero=2,keyed_draws=true']
    """
    settings = [name for name in DEFAULTS if name not in _AXES and getattr(plan, name) != DEFAULTS[name]]
    for name in (*settings, *_AXES):
        for value in _lower(name, getattr(plan, name)):
            with suppress(PlanError):  # another setting needs this one
                yield replace(plan, **{name: value})


def _lower(name: str, value: Any) -> list[Any]:
    if value == DEFAULTS[name]:
        return []
    if name == "zero":
        return [*range(value)]
    return [DEFAULTS[name], *([2] if name in _COUNTS and value > 2 else [])]


def _listed(plans: tuple[str, ...]) -> str:
    return " and ".join([", ".join(plans[:-1]), plans[-1]] if len(plans) > 1 else plans)

"""The cheapest combination of options, where a change that several want is paid once.

A sum of tables (`bucket_elimination.py`): what each option takes, and for every change a table over what it
starts from and who wants it. Where too many want it for one table, each of them pays a share, which is never
more than the change takes: the least sum is then a bound from below. Options that would cost more than a
combination that is known are left out, the shares are moved to those who want the change, and so on, until
the rest is small enough to be done exactly, or the bound is met (shares by the steps of Frank and Wolfe,
1956). Where even that is too much, as where every layer takes the results of all before it, one is found by
steps (`coordinate_descent.py`), and nobody knows how far from the best it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from meshloom.tensor_parallel.search.bucket_elimination import Floats, Least
from meshloom.tensor_parallel.search.coordinate_descent import descend
from meshloom.tensor_parallel.search.milp import GAP, cheapest_integers
from meshloom.tensor_parallel.search.reshards import Reshard, cost_of, kept_of, least_of

ROUNDS = 60  # of moving shares; what is found then is as far from the best as `Combination` says
SAME = 1e-9  # relative: sums of the same numbers in another order


@dataclass(frozen=True, kw_only=True)
class Combination:
    """values: of each unknown. total: what they cost. bound: what any combination costs, or more; -inf: not
    known. bounds: see `with_each`."""

    values: tuple[int, ...]
    total: float
    bound: float
    bounds: Callable[[], Sequence[Floats]]

    @property
    def is_proved(self) -> bool:
        """Whether nothing is cheaper, but for what the search is not for."""
        return self.total - self.bound <= GAP * abs(self.total)

    @cached_property
    def with_each(self) -> Sequence[Floats]:
        """For every value of every unknown, what any combination with it costs, or more. It takes as long as
        all else, so it is found when it is asked for."""
        return self.bounds()


def cheapest(own: Sequence[Floats], changes: Sequence[Reshard]) -> Combination | None:
    """The cheapest value for every unknown. own: [its values], what each takes by itself; inf: cannot be.
    None: there is no combination."""
    kept = [np.flatnonzero(np.isfinite(each)) for each in own]
    shares = [_even(change) for change in changes]
    best, found = math.inf, None
    for turn in range(ROUNDS):
        rest, rest_changes = (
            [each[keep] for each, keep in zip(own, kept, strict=True)],
            [kept_of(change, kept) for change in changes],
        )
        least = least_of(rest, rest_changes)
        exact = least is not None
        least = least or least_of(rest, rest_changes, shares)
        if least is None:
            start = found.values if found is not None else _any(own, changes)
            if start is None:
                return None
            values = descend(own, changes, start)
            bounds = lambda: [np.full(len(each), -math.inf) for each in own]  # noqa: E731
            return Combination(
                values=values, total=cost_of(values, own, changes), bound=-math.inf, bounds=bounds
            )
        if math.isinf(least.total):
            return found
        values = tuple(int(keep[value]) for keep, value in zip(kept, least.values(), strict=False))
        total = cost_of(values, own, changes)
        best_values = values if found is None or total < best else found.values
        best = min(best, total)
        found = Combination(
            values=best_values,
            total=best,
            bound=min(least.total, best),
            bounds=partial(_bounds, own, kept, least, best),
        )
        if exact or best - least.total <= SAME * abs(best):
            return found
        kept = [
            keep[low[keep] <= best + SAME * abs(best)]
            for keep, low in zip(kept, found.with_each, strict=True)
        ]
        for change, share in zip(changes, shares, strict=True):
            _move(change, share, values, 2 / (turn + 3))
    return found


def _any(own: Sequence[Floats], changes: Sequence[Reshard]) -> Sequence[int] | None:
    """A combination that can be: the first values, with which nothing is divided, else one that an integer
    program finds. None: there is none."""
    first = [0] * len(own)
    if math.isfinite(cost_of(first, own, changes)):
        return first
    found = cheapest_integers(own, changes)
    return found.values if found is not None else None


def _bounds(
    own: Sequence[Floats], kept: Sequence[npt.NDArray[np.intp]], least: Least, best: float
) -> list[Floats]:
    """Of every value: what was left out before costs at least as much as the best that is known."""
    bounds = [np.where(np.isfinite(each), best, np.inf) for each in own]
    for bound, keep, low in zip(bounds, kept, least.with_each(), strict=False):
        bound[keep] = low
    return bounds


def _even(change: Reshard) -> dict[int, Floats]:
    """Equal shares [targets] of all that can want a change."""
    able = {user: wants.any(axis=0) for user, wants in change.wants.items()}
    count = np.maximum(sum(each.astype(float) for each in able.values()), 1.0)
    return {user: each / count for user, each in able.items()}


def _move(change: Reshard, shares: Mapping[int, Floats], values: Sequence[int], step: float) -> None:
    """Move shares towards those who want the change in a combination."""
    wanted = {user: wants[values[user]] for user, wants in change.wants.items()}
    count = sum(each.astype(float) for each in wanted.values())
    for user, share in shares.items():
        share += step * np.where(count > 0, wanted[user] / np.maximum(count, 1), share) - step * share

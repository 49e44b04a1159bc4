"""The cheapest combination of options, where a reshard that several variables want is paid once.

The cost is a sum of tables (`bucket_elimination.py`): one for the options of each variable, and one for each
reshard over its source and all variables that may want it. If these are too many for one table, each of them
pays a share of the reshard, and the least sum is a lower bound. Options that would cost more than the best
known combination are dropped, and shares move to the variables that do want the reshard (Frank and Wolfe,
1956), until the rest can be solved exactly or the bound is met. If even that is too large, as where every
layer takes the results of all layers before it, coordinate descent finds a combination without a bound
(`coordinate_descent.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from meshloom.tensor_parallel.search.bucket_elimination import Floats, LeastSum
from meshloom.tensor_parallel.search.coordinate_descent import descend
from meshloom.tensor_parallel.search.milp import GAP, cheapest_by_milp
from meshloom.tensor_parallel.search.reshards import Reshard, least_combination, restricted, total_cost

ROUNDS = 60  # of moving shares; `Combination.bound` says how far the result may be from the optimum
SAME = 1e-9  # relative tolerance for sums of the same numbers in another order


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A value for each variable. total: their cost. bound: a lower bound of all combinations; -inf: unknown.
    bounds: computes `min_marginals`."""

    values: tuple[int, ...]
    total: float
    bound: float
    bounds: Callable[[], Sequence[Floats]]

    @property
    def is_proved(self) -> bool:
        """Whether no combination is cheaper by more than the solver's tolerance."""
        return self.total - self.bound <= GAP * abs(self.total)

    @cached_property
    def min_marginals(self) -> Sequence[Floats]:
        """For every value of every variable, a lower bound of all combinations with it. Computed on first
        access: this takes as long as the search."""
        return self.bounds()


def cheapest(
    unary: Sequence[Floats],
    reshards: Sequence[Reshard],
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Combination | None:
    """The cheapest combination. None: all are impossible. unary: of each variable [its values], the cost of
    each value alone; inf: impossible. told: as of `least_sum`, in each of its rounds."""
    kept = [np.flatnonzero(np.isfinite(each)) for each in unary]
    shares = [_even(reshard) for reshard in reshards]
    best, found = math.inf, None
    for turn in range(ROUNDS):
        rest, rest_reshards = (
            [each[keep] for each, keep in zip(unary, kept, strict=True)],
            [restricted(reshard, kept) for reshard in reshards],
        )
        least = least_combination(rest, rest_reshards, told=told)
        exact = least is not None
        least = least or least_combination(rest, rest_reshards, shares, told)
        if least is None:
            start = found.values if found is not None else _any(unary, reshards)
            if start is None:
                return None
            values = descend(unary, reshards, start)
            bounds = lambda: [np.full(len(each), -math.inf) for each in unary]  # noqa: E731
            return Combination(
                values=values, total=total_cost(values, unary, reshards), bound=-math.inf, bounds=bounds
            )
        if math.isinf(least.total):
            return found
        values = tuple(int(keep[value]) for keep, value in zip(kept, least.values(), strict=False))
        total = total_cost(values, unary, reshards)
        best_values = values if found is None or total < best else found.values
        best = min(best, total)
        found = Combination(
            values=best_values,
            total=best,
            bound=min(least.total, best),
            bounds=partial(_bounds, unary, kept, least, best),
        )
        if exact or best - least.total <= SAME * abs(best):
            return found
        kept = [
            keep[low[keep] <= best + SAME * abs(best)]
            for keep, low in zip(kept, found.min_marginals, strict=True)
        ]
        for reshard, share in zip(reshards, shares, strict=True):
            _move(reshard, share, values, 2 / (turn + 3))
    return found


def _any(unary: Sequence[Floats], reshards: Sequence[Reshard]) -> Sequence[int] | None:
    """A possible combination: the first values, with which nothing is sharded, or one that an integer program
    finds. None: there is none."""
    first = [0] * len(unary)
    if math.isfinite(total_cost(first, unary, reshards)):
        return first
    found = cheapest_by_milp(unary, reshards)
    return found.values if found is not None else None


def _bounds(
    unary: Sequence[Floats], kept: Sequence[npt.NDArray[np.intp]], least: LeastSum, best: float
) -> list[Floats]:
    """Lower bounds of every value; those dropped before cost at least as much as the best known
    combination."""
    bounds = [np.where(np.isfinite(each), best, np.inf) for each in unary]
    for bound, keep, low in zip(bounds, kept, least.min_marginals(), strict=False):
        bound[keep] = low
    return bounds


def _even(reshard: Reshard) -> dict[int, Floats]:
    """Equal shares [targets] of a reshard for all variables that may want it."""
    able = {user: wants.any(axis=0) for user, wants in reshard.wants.items()}
    count = np.maximum(sum(each.astype(float) for each in able.values()), 1.0)
    return {user: each / count for user, each in able.items()}


def _move(reshard: Reshard, shares: Mapping[int, Floats], values: Sequence[int], step: float) -> None:
    """Moves shares towards the variables that want the reshard in a combination."""
    wanted = {user: wants[values[user]] for user, wants in reshard.wants.items()}
    count = sum(each.astype(float) for each in wanted.values())
    for user, share in shares.items():
        share += step * np.where(count > 0, wanted[user] / np.maximum(count, 1), share) - step * share

"""The cheapest combination of options, where a change that several want is paid once.

A sum of tables (`least.py`): what each option takes, and for every change a table over what it starts from and who wants it. Where too
many want it for one table, each of them pays a share, which is never more than the change takes: the least sum is then a bound from
below. Options that would cost more than a combination that is known are left out, the shares are moved to those who want the change,
and so on, until the rest is small enough to be done exactly, or the bound is met (shares by the steps of Frank and Wolfe, 1956). Where even
that is too much, as where every layer takes the results of all before it, an integer program is solved instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from meshloom.graph.change import Change, Wants
from meshloom.graph.integers import cheapest_integers
from meshloom.graph.least import Floats, Least, Table, least_sum

TOGETHER = 2**14  # entries of a table over all who want a change
ROUNDS = 60  # of moving shares; what is found then is as far from the best as `Found` says
SAME = 1e-9  # relative: sums of the same numbers in another order


@dataclass(frozen=True, kw_only=True)
class Found:
    """values: of each unknown. total: what they cost. bound: what any combination costs, or more. bounds: see `with_each`."""

    values: tuple[int, ...]
    total: float
    bound: float
    bounds: Callable[[], Sequence[Floats]]

    @cached_property
    def with_each(self) -> Sequence[Floats]:
        """For every value of every unknown, what any combination with it costs, or more. It takes as long as all else, so it is found when it is asked for."""
        return self.bounds()


def cheapest(own: Sequence[Floats], changes: Sequence[Change]) -> Found | None:
    """The cheapest value for every unknown. own: [its values], what each takes by itself; inf: cannot be. None: there is no combination."""
    kept = [np.flatnonzero(np.isfinite(each)) for each in own]
    shares = [_even(change) for change in changes]
    best, found = math.inf, None
    for turn in range(ROUNDS):
        rest, rest_changes = [each[keep] for each, keep in zip(own, kept, strict=True)], [kept_of(change, kept) for change in changes]
        least = _least(rest, rest_changes)
        exact = least is not None
        least = least or _least(rest, rest_changes, shares)
        if least is None:
            known = cheapest_integers(rest, rest_changes)
            if known is not None and known[1] < best:
                values = tuple(int(keep[value]) for keep, value in zip(kept, known[0], strict=True))
                found = Found(values=values, total=known[1], bound=-math.inf, bounds=lambda: [np.full(len(each), -math.inf) for each in own])
            return found
        if math.isinf(least.total):
            return found
        values = tuple(int(keep[value]) for keep, value in zip(kept, least.values(), strict=False))
        total = cost_of(values, own, changes)
        best_values = values if found is None or total < best else found.values
        best = min(best, total)
        found = Found(values=best_values, total=best, bound=min(least.total, best), bounds=partial(_bounds, own, kept, least, best))
        if exact or best - least.total <= SAME * abs(best):
            return found
        kept = [keep[low[keep] <= best + SAME * abs(best)] for keep, low in zip(kept, found.with_each, strict=True)]
        for change, share in zip(changes, shares, strict=True):
            _move(change, share, values, 2 / (turn + 3))
    return found


def _bounds(own: Sequence[Floats], kept: Sequence[npt.NDArray[np.intp]], least: Least, best: float) -> list[Floats]:
    """Of every value: what was left out before costs at least as much as the best that is known."""
    bounds = [np.where(np.isfinite(each), best, np.inf) for each in own]
    for bound, keep, low in zip(bounds, kept, least.with_each(), strict=False):
        bound[keep] = low
    return bounds


def cost_of(values: Sequence[int], own: Sequence[Floats], changes: Sequence[Change]) -> float:
    """What a combination costs."""
    total = math.fsum(float(each[value]) for each, value in zip(own, values, strict=True))
    for change in changes:
        wanted = change.always.copy()
        for user, wants in change.wants.items():
            wanted |= wants[values[user]]
        total += float(change.costs[values[change.source]][wanted].sum())
    return total


def _least(own: Sequence[Floats], changes: Sequence[Change], shares: Sequence[Mapping[int, Floats]] | None = None) -> Least | None:
    sizes = [len(each) for each in own]
    tables = [Table(scope=(unknown,), entries=each) for unknown, each in enumerate(own)]
    for number, change in enumerate(changes):
        tables += _tables(change, sizes, shares[number] if shares is not None else None)
    return least_sum(sizes, tables)


def _tables(change: Change, sizes: list[int], shares: Mapping[int, Floats] | None) -> Iterator[Table]:
    """A change as tables, target by target. shares: what each of those pays who can want it; none: exactly, with an unknown of its own if need be."""
    for target in range(change.costs.shape[1]):
        costs = change.costs[:, target]
        users = {user: wants[:, target] for user, wants in change.wants.items() if wants[:, target].any()}
        itself = users.pop(change.source, np.zeros(len(costs), dtype=bool))  # in a block whose result is what the next one like it takes
        if change.always[target] or any(wants.all() for wants in users.values()):
            yield Table(scope=(change.source,), entries=costs)
        elif math.prod(sizes[user] for user in users) * len(costs) <= TOGETHER:
            yield Table(scope=(change.source, *users), entries=_together(costs, itself, list(users.values())))
        elif shares is not None:
            share = {user: np.where(np.isfinite(costs), costs * each[target], np.inf) for user, each in shares.items()}
            if itself.any():
                yield Table(scope=(change.source,), entries=np.where(itself, share[change.source], 0.0))
            for user, wants in users.items():
                yield Table(scope=(change.source, user), entries=_together(share[user], np.zeros_like(itself), [wants]))
        else:
            paid = len(sizes)  # 0: the change is not made
            sizes.append(2)
            yield Table(scope=(change.source, paid), entries=np.stack([np.where(itself, np.inf, 0.0), costs], axis=1))
            for user, wants in users.items():
                yield Table(scope=(user, paid), entries=np.stack([np.where(wants, np.inf, 0.0), np.zeros(len(wants))], axis=1))


def _together(costs: Floats, itself: Wants, users: Sequence[Wants]) -> Floats:
    """[values of source, of each user]: the cost, if the source itself or anyone wants it."""
    wanted = itself.reshape([-1] + [1] * len(users))
    for place, wants in enumerate(users):
        wanted = wanted | wants.reshape([-1 if dim == place + 1 else 1 for dim in range(len(users) + 1)])
    return np.where(wanted, costs.reshape([-1] + [1] * len(users)), 0.0)


def kept_of(change: Change, kept: Sequence[npt.NDArray[np.intp]]) -> Change:
    """The change with the values of each unknown that are left."""
    wants = {user: wants[kept[user]] for user, wants in change.wants.items()}
    return replace(change, costs=change.costs[kept[change.source]], wants=wants)


def _even(change: Change) -> dict[int, Floats]:
    """Equal shares [targets] of all that can want a change."""
    able = {user: wants.any(axis=0) for user, wants in change.wants.items()}
    count = np.maximum(sum(each.astype(float) for each in able.values()), 1.0)
    return {user: each / count for user, each in able.items()}


def _move(change: Change, shares: Mapping[int, Floats], values: Sequence[int], step: float) -> None:
    """Move shares towards those who want the change in a combination."""
    wanted = {user: wants[values[user]] for user, wants in change.wants.items()}
    count = sum(each.astype(float) for each in wanted.values())
    for user, share in shares.items():
        share += step * np.where(count > 0, wanted[user] / np.maximum(count, 1), share) - step * share

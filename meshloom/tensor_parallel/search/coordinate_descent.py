"""A combination made cheaper a few unknowns at a time, where all of them at once are too many.

    a - b - c - d - e - f        the best a, b, c, d for e, f as they are; then the best c, d, e, f for a, b; ... until none is better

Unknowns are taken with those around them, as far as these can be done exactly, so what is found is at least
as good as any of these steps can make it. It need not be the best.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.reshards import Reshard, cost_of, least_of

TOGETHER = 80  # unknowns that are tried together
TURNS = 20  # of each unknown at most; few need more than one
SAME = 1e-9  # relative: sums of the same numbers in another order


def descend(own: Sequence[Floats], changes: Sequence[Reshard], values: Sequence[int]) -> tuple[int, ...]:
    """A combination that is as cheap as `values` or cheaper. own, changes: as for `cheapest`."""
    within: list[list[int]] = [[] for _ in own]  # unknown -> changes that it is in
    for number, change in enumerate(changes):
        for unknown in {change.source, *change.wants}:
            within[unknown].append(number)
    now, total = list(values), cost_of(values, own, changes)
    waiting = dict.fromkeys(range(len(own)))
    for _ in range(TURNS * len(own)):
        if not waiting:
            break
        waiting.pop(first := next(iter(waiting)))
        near = _near(first, within, changes)
        while (better := _best(near, own, _around(near, within, changes), now)) is None:
            near = near[: len(near) // 2]
        for unknown in near[: len(near) // 2]:  # those at the rim are tried again, with what is around them
            waiting.pop(unknown, None)
        changed = [better.get(unknown, value) for unknown, value in enumerate(now)]
        cost = cost_of(changed, own, changes) if changed != now else total
        if cost < total - SAME * abs(total):
            moved = [unknown for unknown in near if changed[unknown] != now[unknown]]
            now, total = changed, cost
            waiting |= dict.fromkeys(
                each
                for change in _around(moved, within, changes)
                for each in (change.source, *change.wants)
                if each not in better
            )
    return tuple(now)


def _around(
    unknowns: Sequence[int], within: Sequence[Sequence[int]], changes: Sequence[Reshard]
) -> list[Reshard]:
    """The changes that some of the unknowns are in."""
    return [
        changes[number]
        for number in dict.fromkeys(number for unknown in unknowns for number in within[unknown])
    ]


def _near(first: int, within: Sequence[Sequence[int]], changes: Sequence[Reshard]) -> list[int]:
    """An unknown and those around it, the nearest first."""
    found = {first: None}
    waiting = deque([first])
    while waiting and len(found) < TOGETHER:
        for number in within[waiting.popleft()]:
            for unknown in (changes[number].source, *changes[number].wants):
                if unknown not in found:
                    found[unknown] = None
                    waiting.append(unknown)
    return list(found)[:TOGETHER]


def _best(
    free: Sequence[int], own: Sequence[Floats], changes: Sequence[Reshard], values: Sequence[int]
) -> Mapping[int, int] | None:
    """The best values of some unknowns, with the others as they are. None: they are too many to be done
    exactly."""
    number = {unknown: place for place, unknown in enumerate(free)}
    kept = [np.flatnonzero(np.isfinite(own[unknown])) for unknown in free]
    costs = [own[unknown][keep] for unknown, keep in zip(free, kept, strict=True)]
    rest: list[Reshard] = []
    for change in changes:
        wanted = change.always.copy()
        for user, wants in change.wants.items():
            if user not in number:
                wanted |= wants[values[user]]
        wants = {
            number[user]: wants[kept[number[user]]] for user, wants in change.wants.items() if user in number
        }
        if change.source in number:
            rest.append(
                Reshard(
                    source=number[change.source],
                    costs=change.costs[kept[number[change.source]]],
                    wants=wants,
                    always=wanted,
                )
            )
        else:  # of one value
            rest.append(
                Reshard(
                    source=len(costs), costs=change.costs[[values[change.source]]], wants=wants, always=wanted
                )
            )
            costs.append(np.zeros(1))
    least = least_of(costs, rest)
    if least is None:
        return None
    found = least.values()
    return {
        unknown: int(keep[found[place]]) for place, (unknown, keep) in enumerate(zip(free, kept, strict=True))
    }

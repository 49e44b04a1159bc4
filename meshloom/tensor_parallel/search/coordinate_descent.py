"""Block coordinate descent: improves a combination by a few variables at a time, if all of them are too many.

    a - b - c - d - e - f        the best a, b, c, d for fixed e, f; then the best c, d, e, f for fixed a, b; ... until nothing improves

Each block is a variable with its neighbours, as many as can be solved exactly. The result is a local optimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.reshards import Reshard, least_combination, total_cost

TOGETHER = 80  # variables in a block
TURNS = 20  # of each variable at most; few need more than one
SAME = 1e-9  # relative tolerance for sums of the same numbers in another order


def descend(unary: Sequence[Floats], reshards: Sequence[Reshard], values: Sequence[int]) -> tuple[int, ...]:
    """A combination at most as expensive as `values`. unary, reshards: as in `cheapest`."""
    within: list[list[int]] = [[] for _ in unary]  # variable -> its reshards
    for number, reshard in enumerate(reshards):
        for variable in {reshard.source, *reshard.wants}:
            within[variable].append(number)
    now, total = list(values), total_cost(values, unary, reshards)
    waiting = dict.fromkeys(range(len(unary)))
    for _ in range(TURNS * len(unary)):
        if not waiting:
            break
        waiting.pop(first := next(iter(waiting)))
        near = _near(first, within, reshards)
        while (better := _best(near, unary, _around(near, within, reshards), now)) is None:
            near = near[: len(near) // 2]
        for variable in near[: len(near) // 2]:  # those at the edge get a block of their unary later
            waiting.pop(variable, None)
        changed = [better.get(variable, value) for variable, value in enumerate(now)]
        cost = total_cost(changed, unary, reshards) if changed != now else total
        if cost < total - SAME * abs(total):
            moved = [variable for variable in near if changed[variable] != now[variable]]
            now, total = changed, cost
            waiting |= dict.fromkeys(
                each
                for reshard in _around(moved, within, reshards)
                for each in (reshard.source, *reshard.wants)
                if each not in better
            )
    return tuple(now)


def _around(
    variables: Sequence[int], within: Sequence[Sequence[int]], reshards: Sequence[Reshard]
) -> list[Reshard]:
    """The reshards of some variables."""
    return [
        reshards[number]
        for number in dict.fromkeys(number for variable in variables for number in within[variable])
    ]


def _near(first: int, within: Sequence[Sequence[int]], reshards: Sequence[Reshard]) -> list[int]:
    """A variable and its neighbours, nearest first."""
    found = {first: None}
    waiting = deque([first])
    while waiting and len(found) < TOGETHER:
        for number in within[waiting.popleft()]:
            for variable in (reshards[number].source, *reshards[number].wants):
                if variable not in found:
                    found[variable] = None
                    waiting.append(variable)
    return list(found)[:TOGETHER]


def _best(
    free: Sequence[int], unary: Sequence[Floats], reshards: Sequence[Reshard], values: Sequence[int]
) -> Mapping[int, int] | None:
    """The best values of some variables with all others fixed. None: they are too many to be solved
    exactly."""
    number = {variable: place for place, variable in enumerate(free)}
    kept = [np.flatnonzero(np.isfinite(unary[variable])) for variable in free]
    costs = [unary[variable][keep] for variable, keep in zip(free, kept, strict=True)]
    rest: list[Reshard] = []
    for reshard in reshards:
        wanted = reshard.always.copy()
        for user, wants in reshard.wants.items():
            if user not in number:
                wanted |= wants[values[user]]
        wants = {
            number[user]: wants[kept[number[user]]] for user, wants in reshard.wants.items() if user in number
        }
        if reshard.source in number:
            rest.append(
                Reshard(
                    source=number[reshard.source],
                    costs=reshard.costs[kept[number[reshard.source]]],
                    wants=wants,
                    always=wanted,
                )
            )
        else:  # of one value
            rest.append(
                Reshard(
                    source=len(costs),
                    costs=reshard.costs[[values[reshard.source]]],
                    wants=wants,
                    always=wanted,
                )
            )
            costs.append(np.zeros(1))
    least = least_combination(costs, rest)
    if least is None:
        return None
    found = least.values()
    return {
        variable: int(keep[found[place]])
        for place, (variable, keep) in enumerate(zip(free, kept, strict=True))
    }

"""Reshards, each wanted by several variables but paid once, and the total cost that the solvers minimise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshloom.tensor_parallel.search.bucket_elimination import Floats, LeastSum, Table, least_sum

Wants = npt.NDArray[np.bool_]
TOGETHER = 2**14  # entries of a table over all variables that want a reshard


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """The reshards of one value. source: the variable that determines the placement it is produced in.

    costs: [values of source, targets]; inf: impossible. Each target is paid once.
    wants: variable -> [its values, targets], which targets each value wants. always: [targets], wanted by any
        combination.
    """

    source: int
    costs: Floats
    wants: Mapping[int, Wants]
    always: Wants


def total_cost(values: Sequence[int], unary: Sequence[Floats], reshards: Sequence[Reshard]) -> float:
    """The cost of a combination."""
    total = math.fsum(float(each[value]) for each, value in zip(unary, values, strict=True))
    for reshard in reshards:
        wanted = reshard.always.copy()
        for user, wants in reshard.wants.items():
            wanted |= wants[values[user]]
        total += float(reshard.costs[values[reshard.source]][wanted].sum())
    return total


def restricted(reshard: Reshard, kept: Sequence[npt.NDArray[np.intp]]) -> Reshard:
    """The reshard with only the values in `kept` of each variable."""
    wants = {user: wants[kept[user]] for user, wants in reshard.wants.items()}
    return replace(reshard, costs=reshard.costs[kept[reshard.source]], wants=wants)


def least_combination(
    unary: Sequence[Floats], reshards: Sequence[Reshard], shares: Sequence[Mapping[int, Floats]] | None = None,
    told: Callable[[int, int], None] = lambda done, of: None
) -> LeastSum | None:  # fmt: skip
    """The cheapest combination. shares: of each reshard, the share that each variable pays; None: the exact
    cost. told: as of `least_sum`. None: the tables would be too large."""
    sizes = [len(each) for each in unary]
    tables = [Table(scope=(variable,), entries=each) for variable, each in enumerate(unary)]
    for number, reshard in enumerate(reshards):
        tables += _tables(reshard, sizes, shares[number] if shares is not None else None)
    return least_sum(sizes, tables, told)


def _tables(reshard: Reshard, sizes: list[int], shares: Mapping[int, Floats] | None) -> Iterator[Table]:
    """The tables of a reshard, target by target. shares: what each variable that may want it pays; None: the
    exact cost, with an auxiliary variable if need be."""
    for target in range(reshard.costs.shape[1]):
        costs = reshard.costs[:, target]
        users = {user: wants[:, target] for user, wants in reshard.wants.items() if wants[:, target].any()}
        # in a block whose output has the placement of the next block's input
        itself = users.pop(reshard.source, np.zeros(len(costs), dtype=bool))
        if reshard.always[target] or any(wants.all() for wants in users.values()):
            yield Table(scope=(reshard.source,), entries=costs)
        elif math.prod(sizes[user] for user in users) * len(costs) <= TOGETHER:
            yield Table(
                scope=(reshard.source, *users), entries=_together(costs, itself, list(users.values()))
            )
        elif shares is not None:
            share = {
                user: np.where(np.isfinite(costs), costs * each[target], np.inf)
                for user, each in shares.items()
            }
            if itself.any():
                yield Table(scope=(reshard.source,), entries=np.where(itself, share[reshard.source], 0.0))
            for user, wants in users.items():
                yield Table(
                    scope=(reshard.source, user),
                    entries=_together(share[user], np.zeros_like(itself), [wants]),
                )
        else:
            paid = len(sizes)  # 0: the reshard does not happen
            sizes.append(2)
            yield Table(
                scope=(reshard.source, paid), entries=np.stack([np.where(itself, np.inf, 0.0), costs], axis=1)
            )
            for user, wants in users.items():
                yield Table(
                    scope=(user, paid),
                    entries=np.stack([np.where(wants, np.inf, 0.0), np.zeros(len(wants))], axis=1),
                )


def _together(costs: Floats, itself: Wants, users: Sequence[Wants]) -> Floats:
    """[values of source, of each user]: the cost, if the source or any user wants the target."""
    wanted = itself.reshape([-1] + [1] * len(users))
    for place, wants in enumerate(users):
        wanted = wanted | wants.reshape([-1 if dim == place + 1 else 1 for dim in range(len(users) + 1)])
    return np.where(wanted, costs.reshape([-1] + [1] * len(users)), 0.0)

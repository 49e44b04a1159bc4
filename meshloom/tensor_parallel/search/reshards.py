"""A reshard that several decisions may want and that is paid once, and the sum of tables that the solvers
minimise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshloom.tensor_parallel.search.bucket_elimination import Floats, Least, Table, least_sum

Wants = npt.NDArray[np.bool_]
TOGETHER = 2**14  # entries of a table over all who want a change


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """A value is changed to what others want. source: the unknown that says what it is changed from.

    costs: [values of source, targets]; inf: cannot be. wants: unknown -> [its values, targets], which of them
    it wants. Each target is paid once. always: [targets], which are wanted whatever is chosen.
    """

    source: int
    costs: Floats
    wants: Mapping[int, Wants]
    always: Wants


def cost_of(values: Sequence[int], own: Sequence[Floats], changes: Sequence[Reshard]) -> float:
    """What a combination costs."""
    total = math.fsum(float(each[value]) for each, value in zip(own, values, strict=True))
    for change in changes:
        wanted = change.always.copy()
        for user, wants in change.wants.items():
            wanted |= wants[values[user]]
        total += float(change.costs[values[change.source]][wanted].sum())
    return total


def kept_of(change: Reshard, kept: Sequence[npt.NDArray[np.intp]]) -> Reshard:
    """The change with the values of each unknown that are left."""
    wants = {user: wants[kept[user]] for user, wants in change.wants.items()}
    return replace(change, costs=change.costs[kept[change.source]], wants=wants)


def least_of(
    own: Sequence[Floats], changes: Sequence[Reshard], shares: Sequence[Mapping[int, Floats]] | None = None
) -> Least | None:
    """The cheapest combination. shares: of each change, what each of those pays who can want it; none:
    exactly. None: the tables would be too large."""
    sizes = [len(each) for each in own]
    tables = [Table(scope=(unknown,), entries=each) for unknown, each in enumerate(own)]
    for number, change in enumerate(changes):
        tables += _tables(change, sizes, shares[number] if shares is not None else None)
    return least_sum(sizes, tables)


def _tables(change: Reshard, sizes: list[int], shares: Mapping[int, Floats] | None) -> Iterator[Table]:
    """A change as tables, target by target. shares: what each of those pays who can want it; none: exactly,
    with an unknown of its own if need be."""
    for target in range(change.costs.shape[1]):
        costs = change.costs[:, target]
        users = {user: wants[:, target] for user, wants in change.wants.items() if wants[:, target].any()}
        # in a block whose result is what the next one like it takes
        itself = users.pop(change.source, np.zeros(len(costs), dtype=bool))
        if change.always[target] or any(wants.all() for wants in users.values()):
            yield Table(scope=(change.source,), entries=costs)
        elif math.prod(sizes[user] for user in users) * len(costs) <= TOGETHER:
            yield Table(scope=(change.source, *users), entries=_together(costs, itself, list(users.values())))
        elif shares is not None:
            share = {
                user: np.where(np.isfinite(costs), costs * each[target], np.inf)
                for user, each in shares.items()
            }
            if itself.any():
                yield Table(scope=(change.source,), entries=np.where(itself, share[change.source], 0.0))
            for user, wants in users.items():
                yield Table(
                    scope=(change.source, user),
                    entries=_together(share[user], np.zeros_like(itself), [wants]),
                )
        else:
            paid = len(sizes)  # 0: the change is not made
            sizes.append(2)
            yield Table(
                scope=(change.source, paid), entries=np.stack([np.where(itself, np.inf, 0.0), costs], axis=1)
            )
            for user, wants in users.items():
                yield Table(
                    scope=(user, paid),
                    entries=np.stack([np.where(wants, np.inf, 0.0), np.zeros(len(wants))], axis=1),
                )


def _together(costs: Floats, itself: Wants, users: Sequence[Wants]) -> Floats:
    """[values of source, of each user]: the cost, if the source itself or anyone wants it."""
    wanted = itself.reshape([-1] + [1] * len(users))
    for place, wants in enumerate(users):
        wanted = wanted | wants.reshape([-1 if dim == place + 1 else 1 for dim in range(len(users) + 1)])
    return np.where(wanted, costs.reshape([-1] + [1] * len(users)), 0.0)

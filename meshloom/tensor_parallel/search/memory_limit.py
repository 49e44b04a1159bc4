"""The cheapest combination of options that keeps to a limit on memory.

Memory gets a price: at the right one, the cheapest combination of seconds and priced bytes is as large as the
limit allows, or there are two, one over the limit and one under it (Lagrange's relaxation; Everett, 1963).
What no combination can cost less than is known then, and options that could only cost more than the one under
the limit are left out; an integer program decides among the few that are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.cheapest import SAME, Combination, cheapest
from meshloom.tensor_parallel.search.milp import GAP, OutOfTimeError, cheapest_integers
from meshloom.tensor_parallel.search.reshards import Reshard, cost_of, kept_of

PRICES = 40  # that are tried at most


class LimitError(Exception):
    """Every combination takes more than the limit. least: what the smallest takes."""

    def __init__(self, least: float) -> None:
        self.least = least


def cheapest_within(
    own: Sequence[Floats],
    changes: Sequence[Reshard],
    own_bytes: Sequence[Floats],
    change_bytes: Sequence[Floats],
    limit: float,
) -> Combination | None:
    """The cheapest value for every unknown that together take `limit` bytes or less. own, changes: as for
    `cheapest`.

    own_bytes, change_bytes: what each takes of the limit, in the same shapes. Raises `LimitError` if none
        does. None: there is no combination.
    """

    def at(price: float, seconds: float = 1.0) -> Combination | None:
        """The cheapest at a price of seconds per byte."""
        return cheapest(*_priced(own, changes, own_bytes, change_bytes, price, seconds))

    def bytes_of(values: Sequence[int]) -> float:
        return cost_of(values, *_priced(own, changes, own_bytes, change_bytes, 1.0, 0.0))

    over, smallest = at(0.0), at(1.0, 0.0)
    if over is None or smallest is None or bytes_of(over.values) <= limit:
        return over
    if bytes_of(smallest.values) > limit * (1 + SAME):
        raise LimitError(bytes_of(smallest.values))
    # it took an integer program without a limit already
    if math.isinf(over.bound) or math.isinf(smallest.bound):
        return _between(own, changes, own_bytes, change_bytes, limit, smallest.values, over, 0.0)
    under, found, middle, price = smallest.values, over, over, 0.0
    for _ in range(PRICES):
        excess = bytes_of(found.values) - bytes_of(under)
        price = (cost_of(under, own, changes) - cost_of(found.values, own, changes)) / excess
        middle = at(price)
        assert middle is not None  # at other prices there was one
        line = cost_of(under, own, changes) + price * bytes_of(under)
        if middle.total >= line - SAME * abs(line):
            break
        if bytes_of(middle.values) <= limit:
            under = middle.values
        else:
            found = middle
    return _between(own, changes, own_bytes, change_bytes, limit, under, middle, price)


def _between(
    own: Sequence[Floats], changes: Sequence[Reshard], own_bytes: Sequence[Floats], change_bytes: Sequence[Floats], limit: float,
    under: Sequence[int], priced: Combination, price: float,
) -> Combination:  # fmt: skip
    """The best of what can still be better than `under`. priced: the cheapest at `price`."""
    total = cost_of(under, own, changes)
    bound = priced.bound - price * limit
    best = Combination(values=tuple(under), total=total, bound=bound, bounds=tuple)
    least_gain = GAP * abs(total)
    if total - bound <= least_gain:
        return best
    kept = [np.flatnonzero(each - price * limit <= total - SAME * abs(total)) for each in priced.with_each]
    kept = [keep if len(keep) else np.array([value]) for keep, value in zip(kept, under, strict=True)]
    rest = [kept_of(change, kept) for change in changes]
    try:
        better = cheapest_integers(
            [each[keep] for each, keep in zip(own, kept, strict=True)],
            rest,
            own_bytes=[each[keep] for each, keep in zip(own_bytes, kept, strict=True)],
            change_bytes=[
                each[kept[change.source]] for each, change in zip(change_bytes, changes, strict=True)
            ],
            limit=limit,
        )
    except OutOfTimeError:
        return best
    if better is None:
        return best
    values = tuple(int(keep[value]) for keep, value in zip(kept, better.values, strict=True))
    found = min(total, cost_of(values, own, changes))
    bound = bound if better.stopped else max(bound, found - least_gain)
    return replace(best, values=values if found < total else best.values, total=found, bound=bound)


def _priced(
    own: Sequence[Floats],
    changes: Sequence[Reshard],
    own_bytes: Sequence[Floats],
    change_bytes: Sequence[Floats],
    price: float,
    seconds: float,
) -> tuple[list[Floats], list[Reshard]]:
    """Seconds and priced bytes as one cost; what cannot be still cannot."""
    return (
        [_sum(each, size, price, seconds) for each, size in zip(own, own_bytes, strict=True)],
        [
            replace(change, costs=_sum(change.costs, size, price, seconds))
            for change, size in zip(changes, change_bytes, strict=True)
        ],
    )


def _sum(costs: Floats, sizes: Floats, price: float, seconds: float) -> Floats:
    return np.where(
        np.isfinite(costs), seconds * np.where(np.isfinite(costs), costs, 0.0) + price * sizes, np.inf
    )

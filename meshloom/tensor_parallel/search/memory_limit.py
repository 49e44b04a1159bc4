"""The cheapest combination of options within a memory limit.

Memory gets a price (Lagrangian relaxation; Everett, 1963). At the right price the cheapest combination takes
exactly the limit, or one is just over it and another just under it. This gives a lower bound; options that
cannot beat the combination under the limit are dropped, and an integer program decides among the few that are
left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.cheapest import SAME, Combination, cheapest
from meshloom.tensor_parallel.search.milp import GAP, OutOfTimeError, cheapest_by_milp
from meshloom.tensor_parallel.search.reshards import Reshard, restricted, total_cost

PRICES = 40  # prices tried at most


class LimitError(Exception):
    """Every combination exceeds the limit. least: bytes of the smallest."""

    def __init__(self, least: float) -> None:
        self.least = least


def cheapest_within(
    unary: Sequence[Floats],
    reshards: Sequence[Reshard],
    unary_bytes: Sequence[Floats],
    reshard_bytes: Sequence[Floats],
    limit: float,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Combination | None:
    """The cheapest combination of at most `limit` bytes. None: all are impossible. unary, reshards: as in
    `cheapest`.

    unary_bytes, reshard_bytes: the bytes of each entry, in the same shapes. told: as of `cheapest`. Raises `LimitError` if none fits.
    """

    def at(price: float, seconds: float = 1.0) -> Combination | None:
        """The cheapest combination at a price in seconds per byte."""
        return cheapest(*_priced(unary, reshards, unary_bytes, reshard_bytes, price, seconds), told)

    def bytes_of(values: Sequence[int]) -> float:
        return total_cost(values, *_priced(unary, reshards, unary_bytes, reshard_bytes, 1.0, 0.0))

    over, smallest = at(0.0), at(1.0, 0.0)
    if over is None or smallest is None or bytes_of(over.values) <= limit:
        return over
    if bytes_of(smallest.values) > limit * (1 + SAME):
        raise LimitError(bytes_of(smallest.values))
    # unlimited, it took an integer program already
    if math.isinf(over.bound) or math.isinf(smallest.bound):
        return _between(unary, reshards, unary_bytes, reshard_bytes, limit, smallest.values, over, 0.0)
    under, found, middle, price = smallest.values, over, over, 0.0
    for _ in range(PRICES):
        excess = bytes_of(found.values) - bytes_of(under)
        price = (total_cost(under, unary, reshards) - total_cost(found.values, unary, reshards)) / excess
        middle = at(price)
        assert middle is not None  # a combination exists at other prices
        line = total_cost(under, unary, reshards) + price * bytes_of(under)
        if middle.total >= line - SAME * abs(line):
            break
        if bytes_of(middle.values) <= limit:
            under = middle.values
        else:
            found = middle
    return _between(unary, reshards, unary_bytes, reshard_bytes, limit, under, middle, price)


def _between(
    unary: Sequence[Floats], reshards: Sequence[Reshard], unary_bytes: Sequence[Floats], reshard_bytes: Sequence[Floats], limit: float,
    under: Sequence[int], priced: Combination, price: float,
) -> Combination:  # fmt: skip
    """The best combination that can still beat `under`. priced: the cheapest at `price`."""
    total = total_cost(under, unary, reshards)
    bound = priced.bound - price * limit
    best = Combination(values=tuple(under), total=total, bound=bound, bounds=tuple)
    least_gain = GAP * abs(total)
    if total - bound <= least_gain:
        return best
    kept = [
        np.flatnonzero(each - price * limit <= total - SAME * abs(total)) for each in priced.min_marginals
    ]
    kept = [keep if len(keep) else np.array([value]) for keep, value in zip(kept, under, strict=True)]
    rest = [restricted(reshard, kept) for reshard in reshards]
    try:
        better = cheapest_by_milp(
            [each[keep] for each, keep in zip(unary, kept, strict=True)],
            rest,
            unary_bytes=[each[keep] for each, keep in zip(unary_bytes, kept, strict=True)],
            reshard_bytes=[
                each[kept[reshard.source]] for each, reshard in zip(reshard_bytes, reshards, strict=True)
            ],
            limit=limit,
        )
    except OutOfTimeError:
        return best
    if better is None:
        return best
    values = tuple(int(keep[value]) for keep, value in zip(kept, better.values, strict=True))
    found = min(total, total_cost(values, unary, reshards))
    bound = bound if better.stopped else max(bound, found - least_gain)
    return replace(best, values=values if found < total else best.values, total=found, bound=bound)


def _priced(
    unary: Sequence[Floats],
    reshards: Sequence[Reshard],
    unary_bytes: Sequence[Floats],
    reshard_bytes: Sequence[Floats],
    price: float,
    seconds: float,
) -> tuple[list[Floats], list[Reshard]]:
    """Seconds plus priced bytes; what is impossible stays so."""
    return (
        [_sum(each, size, price, seconds) for each, size in zip(unary, unary_bytes, strict=True)],
        [
            replace(reshard, costs=_sum(reshard.costs, size, price, seconds))
            for reshard, size in zip(reshards, reshard_bytes, strict=True)
        ],
    )


def _sum(costs: Floats, sizes: Floats, price: float, seconds: float) -> Floats:
    return np.where(
        np.isfinite(costs), seconds * np.where(np.isfinite(costs), costs, 0.0) + price * sizes, np.inf
    )

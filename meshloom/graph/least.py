"""The least sum of tables over unknowns with few values each, found exactly by eliminating one unknown after another.

Nonserial dynamic programming (Bertele and Brioschi, 1972), or bucket elimination (Dechter, 1999):

    a chain of tables        f(a, b) + g(b, c) + h(c, d)
    without a                F(b) + g(b, c) + h(c, d)          F(b) = min over a of f(a, b)
    without b                G(c) + h(c, d)                    G(c) = min over b of F(b) + g(b, c)

What is left at the end is the least sum; walking back gives the values. It takes as long as the largest joined table is big, which for
programs of neural networks is small: few values are alive at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LARGEST = 2**22  # entries of a joined table: 32 MiB


@dataclass(frozen=True, kw_only=True)
class Table:
    """entries: [size of each unknown of `scope`], what each of their values takes together; inf where they cannot be. No unknown twice."""

    scope: tuple[int, ...]
    entries: Floats


@dataclass(frozen=True, kw_only=True)
class _Step:
    """An unknown that is eliminated. joined: [*scope, its values], the sum of all tables it was in. best: [*scope], the least over its values."""

    unknown: int
    scope: tuple[int, ...]
    joined: Floats
    best: Floats


class Least:
    """The least sum, as found. steps: in the order of elimination. total: the least sum; inf if there is none."""

    def __init__(self, steps: Sequence[_Step], total: float) -> None:
        self._steps = steps
        self.total = total

    def values(self) -> list[int]:
        """A value for every unknown, that together take the least."""
        found = [0] * len(self._steps)
        for step in reversed(self._steps):
            found[step.unknown] = int(step.joined[tuple(found[each] for each in step.scope)].argmin())
        return found

    def with_each(self) -> list[Floats]:
        """For every value of every unknown [its size], the least sum in which it has that value."""
        step_of = {step.unknown: step for step in self._steps}
        order = {step.unknown: number for number, step in enumerate(self._steps)}
        sums: dict[int, Floats] = {}  # unknown -> [*scope, its values], the least sum with those
        found: list[Floats] = [np.zeros(0)] * len(self._steps)
        for step in reversed(self._steps):
            if not step.scope:
                others = np.asarray(self.total - step.best) if math.isfinite(self.total) else np.asarray(np.inf)
            else:
                # `best` was added where the next of the scope was eliminated: all of that sum but this share.
                next_one = min(step.scope, key=order.__getitem__)
                outer = (*step_of[next_one].scope, next_one)
                dropped = tuple(place for place, each in enumerate(outer) if each not in step.scope)
                least = sums[next_one].min(axis=dropped) if dropped else sums[next_one]
                kept = [each for each in outer if each in step.scope]
                least = least.transpose([kept.index(each) for each in step.scope])
                others = np.where(np.isfinite(least), least - np.where(np.isfinite(step.best), step.best, 0.0), np.inf)
            sums[step.unknown] = step.joined + others[..., None]
            found[step.unknown] = sums[step.unknown].min(axis=tuple(range(len(step.scope))))
        return found


def least_sum(sizes: Sequence[int], tables: Sequence[Table]) -> Least | None:
    """The least sum of `tables` over unknowns with `sizes` values. None: a joined table would have more than `LARGEST` entries.

    >>> found = least_sum([2, 2], [Table(scope=(0, 1), entries=np.array([[5.0, 3.0], [1.0, 9.0]])), Table(scope=(0,), entries=np.array([0.0, 7.0]))])
    >>> found.total, found.values(), [each.tolist() for each in found.with_each()]
    (3.0, [0, 1], [[3.0, 8.0], [5.0, 3.0]])
    """
    within: list[dict[int, Table]] = [{} for _ in sizes]  # unknown -> number of a table -> that table
    for number, table in enumerate(tables):
        for each in table.scope:
            within[each][number] = table

    def entries(unknown: int) -> int:
        return math.prod(sizes[each] for each in {unknown}.union(*(table.scope for table in within[unknown].values())))

    waiting = [(entries(each), each) for each in range(len(sizes))]
    heapq.heapify(waiting)
    newest = {each: count for count, each in waiting}
    steps: list[_Step] = []
    total, number = 0.0, len(tables)
    while waiting:  # the one with the smallest joined table first
        count, unknown = heapq.heappop(waiting)
        if newest.get(unknown) != count:
            continue
        if count > LARGEST:
            return None
        del newest[unknown]
        step = _eliminated(unknown, sizes, list(within[unknown].values()))
        steps.append(step)
        for key, table in list(within[unknown].items()):
            for each in table.scope:
                del within[each][key]
        if step.scope:
            rest = Table(scope=step.scope, entries=step.best)
            for each in step.scope:
                within[each][number] = rest
            number += 1
        else:
            total += float(step.best)
        for each in step.scope:
            count = entries(each)
            if count != newest[each]:
                newest[each] = count
                heapq.heappush(waiting, (count, each))
    return Least(steps, total)


def _eliminated(unknown: int, sizes: Sequence[int], tables: Sequence[Table]) -> _Step:
    scope = tuple(dict.fromkeys(each for table in tables for each in table.scope if each != unknown))
    axes = {each: place for place, each in enumerate((*scope, unknown))}
    joined: Any = np.zeros([sizes[each] for each in axes])
    for table in tables:
        order = sorted(range(len(table.scope)), key=lambda place, scope=table.scope: axes[scope[place]])
        shape = [1] * len(axes)
        for place in order:
            shape[axes[table.scope[place]]] = sizes[table.scope[place]]
        joined += table.entries.transpose(order).reshape(shape)
    return _Step(unknown=unknown, scope=scope, joined=joined, best=np.asarray(joined.min(axis=-1)))

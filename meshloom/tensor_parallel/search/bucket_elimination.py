"""The least sum of tables over unknowns with few values each, found exactly by eliminating one unknown after
another.

Nonserial dynamic programming (Bertele and Brioschi, 1972), or bucket elimination (Dechter, 1999):

    a chain of tables        f(a, b) + g(b, c) + h(c, d)
    without a                F(b) + g(b, c) + h(c, d)          F(b) = min over a of f(a, b)
    without b                G(c) + h(c, d)                    G(c) = min over b of F(b) + g(b, c)

What is left at the end is the least sum; walking back gives the values. It takes as long as the largest
joined table is big, which for programs of neural networks is small: few values are alive at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LARGEST = 2**24  # entries of a joined table: 128 MiB


@dataclass(frozen=True, kw_only=True)
class Table:
    """entries: [size of each unknown of `scope`], what each of their values takes together; inf where they
    cannot be. No unknown twice."""

    scope: tuple[int, ...]
    entries: Floats


@dataclass(frozen=True, kw_only=True)
class _Step:
    """An unknown that is eliminated. size: of its values. tables: all that it was in, whose sum is [*scope,
    its values]. best: [*scope], the least over its values.

    The sum itself is made anew where it is asked for: it is larger than all that is kept, by as much as the
    unknown has values.
    """

    unknown: int
    size: int
    scope: tuple[int, ...]
    tables: tuple[Table, ...]
    best: Floats

    def joined(self) -> Floats:
        """[*scope, its values]: the sum of its tables."""
        axes = {each: place for place, each in enumerate((*self.scope, self.unknown))}
        size_of = {
            each: size
            for table in self.tables
            for each, size in zip(table.scope, table.entries.shape, strict=True)
        } | {self.unknown: self.size}
        joined = np.zeros([size_of[each] for each in axes])
        for table in self.tables:
            order = sorted(range(len(table.scope)), key=lambda place, scope=table.scope: axes[scope[place]])
            shape = [1] * len(axes)
            for place in order:
                shape[axes[table.scope[place]]] = table.entries.shape[place]
            joined += table.entries.transpose(order).reshape(shape)
        return joined


class Least:
    """The least sum, as found. steps: in the order of elimination. total: the least sum; inf if there is
    none."""

    def __init__(self, steps: Sequence[_Step], total: float) -> None:
        self._steps = steps
        self.total = total

    def values(self) -> list[int]:
        """A value for every unknown, that together take the least."""
        found = [0] * len(self._steps)
        for step in reversed(self._steps):
            sums = np.zeros(step.size)
            for table in step.tables:
                sums = (
                    sums
                    + table.entries[
                        tuple(slice(None) if each == step.unknown else found[each] for each in table.scope)
                    ]
                )
            found[step.unknown] = int(sums.argmin())
        return found

    def with_each(self) -> list[Floats]:
        """For every value of every unknown [its size], the least sum in which it has that value."""
        order = {step.unknown: number for number, step in enumerate(self._steps)}
        # where `best` was added
        next_of = {step.unknown: min(step.scope, key=order.__getitem__) for step in self._steps if step.scope}
        before: dict[int, list[_Step]] = {}
        for step in self._steps:
            if step.scope:
                before.setdefault(next_of[step.unknown], []).append(step)
        least: dict[int, Floats] = {}  # unknown -> [*scope], the least sum with those
        found: list[Floats] = [np.zeros(0)] * len(self._steps)
        for step in reversed(self._steps):
            if not step.scope:
                others = (
                    np.asarray(self.total - step.best) if math.isfinite(self.total) else np.asarray(np.inf)
                )
            else:  # all of that sum but this share
                sums = least.pop(step.unknown)
                others = np.where(
                    np.isfinite(sums), sums - np.where(np.isfinite(step.best), step.best, 0.0), np.inf
                )
            sums = step.joined()
            sums += others[..., None]
            found[step.unknown] = sums.min(axis=tuple(range(len(step.scope))))
            outer = (*step.scope, step.unknown)
            for each in before.get(step.unknown, ()):
                dropped = tuple(place for place, unknown in enumerate(outer) if unknown not in each.scope)
                kept = [unknown for unknown in outer if unknown in each.scope]
                least[each.unknown] = (sums.min(axis=dropped) if dropped else sums).transpose(
                    [kept.index(unknown) for unknown in each.scope]
                )
        return found


def least_sum(sizes: Sequence[int], tables: Sequence[Table]) -> Least | None:
    """The least sum of `tables` over unknowns with `sizes` values. None: a joined table would have more than
    `LARGEST` entries.

    >>> found = least_sum([2, 2], [Table(scope=(0, 1), entries=np.array([[5.0, 3.0], [1.0, 9.0]])), Table(scope=(0,), entries=np.array([0.0, 7.0]))])
    >>> found.total, found.values(), [each.tolist() for each in found.with_each()]
    (3.0, [0, 1], [[3.0, 8.0], [5.0, 3.0]])
    """
    order = _order(sizes, tables)
    if order is None:
        return None
    within: list[dict[int, Table]] = [{} for _ in sizes]  # unknown -> number of a table -> that table
    for number, table in enumerate(tables):
        for each in table.scope:
            within[each][number] = table
    steps: list[_Step] = []
    total = 0.0
    for number, unknown in enumerate(order, len(tables)):
        step = _eliminated(unknown, sizes[unknown], list(within[unknown].values()))
        steps.append(step)
        for key, table in list(within[unknown].items()):
            for each in table.scope:
                del within[each][key]
        if step.scope:
            rest = Table(scope=step.scope, entries=step.best)
            for each in step.scope:
                within[each][number] = rest
        else:
            total += float(step.best)
    return Least(steps, total)


def _order(sizes: Sequence[int], tables: Sequence[Table]) -> list[int] | None:
    """Of unknowns: the one with the smallest joined table is eliminated first. None: one of these has more
    than `LARGEST` entries."""
    beside: list[set[int]] = [set() for _ in sizes]  # unknown -> those that are in one table with it
    for table in tables:
        for each in table.scope:
            beside[each].update(table.scope)

    def entries(unknown: int) -> int:
        return math.prod(sizes[each] for each in beside[unknown] | {unknown})

    waiting = [(entries(each), each) for each in range(len(sizes))]
    heapq.heapify(waiting)
    newest = {each: count for count, each in waiting}
    order: list[int] = []
    while waiting:
        count, unknown = heapq.heappop(waiting)
        if newest.get(unknown) != count:
            continue
        if count > LARGEST:
            return None
        del newest[unknown]
        order.append(unknown)
        others = beside[unknown] - {unknown}
        for each in others:
            beside[each] |= others
            beside[each].discard(unknown)
            count = entries(each)
            if count != newest[each]:
                newest[each] = count
                heapq.heappush(waiting, (count, each))
    return order


def _eliminated(unknown: int, size: int, tables: Sequence[Table]) -> _Step:
    scope = tuple(dict.fromkeys(each for table in tables for each in table.scope if each != unknown))
    step = _Step(unknown=unknown, size=size, scope=scope, tables=tuple(tables), best=np.zeros(()))
    return replace(step, best=np.asarray(step.joined().min(axis=-1)))

"""The least sum of tables over variables with few values each, exactly, by eliminating one variable after
another.

Nonserial dynamic programming (Bertele and Brioschi, 1972), or bucket elimination (Dechter, 1999):

    a chain of tables        f(a, b) + g(b, c) + h(c, d)
    without a                F(b) + g(b, c) + h(c, d)          F(b) = min over a of f(a, b)
    without b                G(c) + h(c, d)                    G(c) = min over b of F(b) + g(b, c)

The last table is the least sum; backtracking gives the values. The run time is that of the largest joined
table, which is small for neural networks: few values are alive at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LARGEST = 2**24  # entries of a joined table: 128 MiB


@dataclass(frozen=True, kw_only=True)
class Table:
    """A cost for all values of some variables. entries: [values of each variable in `scope`]; inf:
    impossible. scope: distinct variables."""

    scope: tuple[int, ...]
    entries: Floats


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The elimination of a variable. size: number of its values. tables: all that contained it; their sum is
    [*scope, its values]. best: [*scope], the minimum over its values.

    The sum is computed again when needed: it is larger than everything stored, by the number of the
    variable's values.
    """

    variable: int
    size: int
    scope: tuple[int, ...]
    tables: tuple[Table, ...]
    best: Floats

    def joined(self) -> Floats:
        """[*scope, its values]: the sum of its tables."""
        axes = {each: place for place, each in enumerate((*self.scope, self.variable))}
        size_of = {
            each: size
            for table in self.tables
            for each, size in zip(table.scope, table.entries.shape, strict=True)
        } | {self.variable: self.size}
        joined = np.zeros([size_of[each] for each in axes])
        for table in self.tables:
            order = sorted(range(len(table.scope)), key=lambda place, scope=table.scope: axes[scope[place]])
            shape = [1] * len(axes)
            for place in order:
                shape[axes[table.scope[place]]] = table.entries.shape[place]
            joined += table.entries.transpose(order).reshape(shape)
        return joined


class LeastSum:
    """The least sum. steps: in the order of elimination. total: the least sum; inf: every combination is
    impossible."""

    def __init__(self, steps: Sequence[_Step], total: float) -> None:
        self._steps = steps
        self.total = total

    def values(self) -> list[int]:
        """The value of every variable in the least sum."""
        found = [0] * len(self._steps)
        for step in reversed(self._steps):
            sums = np.zeros(step.size)
            for table in step.tables:
                sums = (
                    sums
                    + table.entries[
                        tuple(slice(None) if each == step.variable else found[each] for each in table.scope)
                    ]
                )
            found[step.variable] = int(sums.argmin())
        return found

    def min_marginals(self) -> list[Floats]:
        """Min-marginals: for every value of every variable [its values], the least sum with that value."""
        order = {step.variable: number for number, step in enumerate(self._steps)}
        # the step that consumed `best`
        next_of = {
            step.variable: min(step.scope, key=order.__getitem__) for step in self._steps if step.scope
        }
        before: dict[int, list[_Step]] = {}
        for step in self._steps:
            if step.scope:
                before.setdefault(next_of[step.variable], []).append(step)
        least: dict[int, Floats] = {}  # variable -> [*scope], the least sum with their values
        found: list[Floats] = [np.zeros(0)] * len(self._steps)
        for step in reversed(self._steps):
            if not step.scope:
                others = (
                    np.asarray(self.total - step.best) if math.isfinite(self.total) else np.asarray(np.inf)
                )
            else:  # that sum without this step's part
                sums = least.pop(step.variable)
                others = np.where(
                    np.isfinite(sums), sums - np.where(np.isfinite(step.best), step.best, 0.0), np.inf
                )
            sums = step.joined()
            sums += others[..., None]
            found[step.variable] = sums.min(axis=tuple(range(len(step.scope))))
            outer = (*step.scope, step.variable)
            for each in before.get(step.variable, ()):
                dropped = tuple(place for place, variable in enumerate(outer) if variable not in each.scope)
                kept = [variable for variable in outer if variable in each.scope]
                least[each.variable] = (sums.min(axis=dropped) if dropped else sums).transpose(
                    [kept.index(variable) for variable in each.scope]
                )
        return found


def least_sum(
    sizes: Sequence[int], tables: Sequence[Table], told: Callable[[int, int], None] = lambda done, of: None
) -> LeastSum | None:
    """The least sum of `tables` over variables with `sizes` values. None: a joined table would have more than
    `LARGEST` entries. told: called with the number of variables that have been eliminated, and that of all.

    >>> found = least_sum([2, 2], [Table(scope=(0, 1), entries=np.array([[5.0, 3.0], [1.0, 9.0]])), Table(scope=(0,), entries=np.array([0.0, 7.0]))])
    >>> found.total, found.values(), [each.tolist() for each in found.min_marginals()]
    (3.0, [0, 1], [[3.0, 8.0], [5.0, 3.0]])
    """
    order = _order(sizes, tables)
    if order is None:
        return None
    within: list[dict[int, Table]] = [{} for _ in sizes]  # variable -> number of a table -> that table
    for number, table in enumerate(tables):
        for each in table.scope:
            within[each][number] = table
    steps: list[_Step] = []
    total = 0.0
    for number, variable in enumerate(order, len(tables)):
        told(number - len(tables) + 1, len(order))
        step = _eliminated(variable, sizes[variable], list(within[variable].values()))
        steps.append(step)
        for key, table in list(within[variable].items()):
            for each in table.scope:
                del within[each][key]
        if step.scope:
            rest = Table(scope=step.scope, entries=step.best)
            for each in step.scope:
                within[each][number] = rest
        else:
            total += float(step.best)
    return LeastSum(steps, total)


def _order(sizes: Sequence[int], tables: Sequence[Table]) -> list[int] | None:
    """The order of elimination: always the variable with the smallest joined table. None: one of these has
    more than `LARGEST` entries."""
    beside: list[set[int]] = [set() for _ in sizes]  # variable -> those in a table with it
    for table in tables:
        for each in table.scope:
            beside[each].update(table.scope)

    def entries(variable: int) -> int:
        return math.prod(sizes[each] for each in beside[variable] | {variable})

    waiting = [(entries(each), each) for each in range(len(sizes))]
    heapq.heapify(waiting)
    newest = {each: count for count, each in waiting}
    order: list[int] = []
    while waiting:
        count, variable = heapq.heappop(waiting)
        if newest.get(variable) != count:
            continue
        if count > LARGEST:
            return None
        del newest[variable]
        order.append(variable)
        others = beside[variable] - {variable}
        for each in others:
            beside[each] |= others
            beside[each].discard(variable)
            count = entries(each)
            if count != newest[each]:
                newest[each] = count
                heapq.heappush(waiting, (count, each))
    return order


def _eliminated(variable: int, size: int, tables: Sequence[Table]) -> _Step:
    scope = tuple(dict.fromkeys(each for table in tables for each in table.scope if each != variable))
    step = _Step(variable=variable, size=size, scope=scope, tables=tuple(tables), best=np.zeros(()))
    return replace(step, best=np.asarray(step.joined().min(axis=-1)))

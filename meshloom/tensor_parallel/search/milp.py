"""The cheapest combination of options by an integer program (HiGHS), for what elimination cannot do: a limit,
or too much that depends on each other.

x[unknown, value]          0 or 1, one of each unknown
z[change, group, target]   1 where a source of that group is changed to the target: at most what makes it so, at least what wants it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.reshards import Reshard

SECONDS = 10.0  # for the solver; then the best found so far is taken
GAP = 1e-3  # how far that may be from the best, of what it costs more than the least of every option alone


class Integers(NamedTuple):
    """values: of every unknown. total: what they cost. stopped: for want of time, so that they may be further
    from the best than `GAP`."""

    values: list[int]
    total: float
    stopped: bool


class OutOfTimeError(Exception):
    """There was not one combination in time."""


Row = tuple[list[int], list[float], float, float]  # unknowns, their factors, and what the sum lies between


def cheapest_integers(
    own: Sequence[Floats],
    changes: Sequence[Reshard],
    *,
    own_bytes: Sequence[Floats] = (),
    change_bytes: Sequence[Floats] = (),
    limit: float = np.inf,
) -> Integers | None:
    """The cheapest value for every unknown; None: there is no combination. own, changes: as for `cheapest`.

    own_bytes, change_bytes: what each takes of the limit, in the same shapes. Raises `OutOfTimeError`.
    """
    first = np.cumsum([0, *map(len, own)])
    costs: list[float] = [float(each) for row in own for each in row]
    sizes: list[float] = [float(each) for row in own_bytes for each in row] or [0.0] * len(costs)
    count = len(costs)
    barred = [place for place, cost in enumerate(costs) if not np.isfinite(cost)]
    rows: list[Row] = [
        (list(range(start, stop)), [1.0] * (stop - start), 1.0, 1.0)
        for start, stop in itertools.pairwise(first)
    ]
    for number, change in enumerate(changes):
        weights = change_bytes[number] if change_bytes else np.zeros_like(change.costs)
        alike, group_of = np.unique(
            np.concatenate([change.costs, weights], axis=1), axis=0, return_inverse=True
        )
        made = [
            [int(first[change.source]) + int(value) for value in np.flatnonzero(group_of.ravel() == group)]
            for group in range(len(alike))
        ]
        num_targets = change.costs.shape[1]
        z = np.arange(len(costs), len(costs) + len(alike) * num_targets).reshape(len(alike), num_targets)
        costs += [float(each) for each in alike[:, :num_targets].ravel()]
        sizes += [float(each) for each in alike[:, num_targets:].ravel()]
        barred += [int(each) for each in z[~np.isfinite(alike[:, :num_targets])]]
        rows += _rows_of(change, first, made, z)
    if np.isfinite(limit):
        scale = max(sizes) or 1.0  # numbers near 1 are what the solver is made for
        rows.append((list(range(len(sizes))), [size / scale for size in sizes], -np.inf, limit / scale))
    result = _solved([cost if np.isfinite(cost) else 0.0 for cost in costs], rows, count, barred, first)
    stopped, found = result.status == 1, result.x
    if found is None and stopped:
        raise OutOfTimeError
    if found is None:
        return None
    values = [int(np.argmax(found[start:stop])) for start, stop in itertools.pairwise(first)]
    return Integers(values, float(np.dot(np.where(np.isfinite(costs), costs, 0.0), found)), stopped)


def _rows_of(change: Reshard, first: Any, made: Sequence[list[int]], z: Any) -> list[Row]:
    rows: list[Row] = []
    for group, unknowns in enumerate(made):
        rows += [([int(each), *unknowns], [1.0, *[-1.0] * len(unknowns)], -np.inf, 0.0) for each in z[group]]
    rows += [
        ([int(each) for each in z[:, target]], [1.0] * len(made), 1.0, np.inf)
        for target in np.flatnonzero(change.always)
    ]
    for user, wants in change.wants.items():
        for target in np.flatnonzero(wants.any(axis=0)):
            wanting = [int(first[user]) + int(value) for value in np.flatnonzero(wants[:, target])]
            rows.append(
                (
                    [*map(int, z[:, target]), *wanting],
                    [*[1.0] * len(made), *[-1.0] * len(wanting)],
                    0.0,
                    np.inf,
                )
            )
        if wants.any(
            axis=1
        ).all():  # it wants it as something, whatever it is made as: this follows for whole numbers, and solvers work with fractions
            targets = np.flatnonzero(wants.any(axis=0))
            for group, unknowns in enumerate(made):
                rows.append(
                    (
                        [*map(int, z[group, targets]), *unknowns],
                        [*[1.0] * len(targets), *[-1.0] * len(unknowns)],
                        0.0,
                        np.inf,
                    )
                )
    return rows


def _solved(
    costs: Sequence[float], rows: Sequence[Row], count: int, barred: Sequence[int], first: Any
) -> Any:
    # takes most of a second, which few processes need
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    factors = [factor for _, each, _, _ in rows for factor in each]
    row_of = [number for number, (unknowns, _, _, _) in enumerate(rows) for _ in unknowns]
    columns = [unknown for unknowns, _, _, _ in rows for unknown in unknowns]
    matrix = coo_matrix((factors, (row_of, columns)), shape=(len(rows), len(costs))).tocsr()
    limits = LinearConstraint(matrix, [low for _, _, low, _ in rows], [high for _, _, _, high in rows])  # type: ignore[arg-type]
    # Of each unknown one value is taken, so the least of them is paid anyway: without it the solver's gap is
    # one in what can be saved.
    excess = np.array(costs)
    for start, stop in itertools.pairwise(first):
        excess[start:stop] -= excess[start:stop].min()
    most = np.ones(len(costs))
    most[list(barred)] = 0.0
    return milp(
        excess / max(excess.max(), 1e-30),
        constraints=limits,
        integrality=(np.arange(len(costs)) < count).astype(int),
        bounds=Bounds(np.zeros(len(costs)), most),  # type: ignore[arg-type]
        options={"mip_rel_gap": GAP, "time_limit": SECONDS},
    )

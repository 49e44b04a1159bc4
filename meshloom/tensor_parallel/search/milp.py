"""The cheapest combination of options by mixed-integer linear programming (HiGHS), for a memory limit, or if
elimination is too large.

x[variable, value]         0 or 1, one of each variable
z[reshard, group, target]  1 if a source of that group is resharded to the target: at most what produces it so, at least what wants it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.reshards import Reshard

SECONDS = 10.0  # for the solver; then its best solution is taken
GAP = 1e-3  # relative tolerance, of what a solution costs beyond the cheapest option of each variable alone


class MilpSolution(NamedTuple):
    """values: of every variable. total: their cost. stopped: the solver ran out of time, so the result may be
    worse than `GAP` says."""

    values: list[int]
    total: float
    stopped: bool


class OutOfTimeError(Exception):
    """The solver found no combination in time."""


Row = tuple[list[int], list[float], float, float]  # columns, coefficients, and the bounds of their sum


def cheapest_by_milp(
    unary: Sequence[Floats],
    reshards: Sequence[Reshard],
    *,
    unary_bytes: Sequence[Floats] = (),
    reshard_bytes: Sequence[Floats] = (),
    limit: float = np.inf,
) -> MilpSolution | None:
    """The cheapest combination. None: all are impossible. unary, reshards: as in `cheapest`.

    unary_bytes, reshard_bytes: the bytes of each entry, in the same shapes. Raises `OutOfTimeError`.
    """
    first = np.cumsum([0, *map(len, unary)])
    costs: list[float] = [float(each) for row in unary for each in row]
    sizes: list[float] = [float(each) for row in unary_bytes for each in row] or [0.0] * len(costs)
    count = len(costs)
    impossible = [place for place, cost in enumerate(costs) if not np.isfinite(cost)]
    rows: list[Row] = [
        (list(range(start, stop)), [1.0] * (stop - start), 1.0, 1.0)
        for start, stop in itertools.pairwise(first)
    ]
    for number, reshard in enumerate(reshards):
        weights = reshard_bytes[number] if reshard_bytes else np.zeros_like(reshard.costs)
        distinct, group_of = np.unique(
            np.concatenate([reshard.costs, weights], axis=1), axis=0, return_inverse=True
        )
        producers = [
            [int(first[reshard.source]) + int(value) for value in np.flatnonzero(group_of.ravel() == group)]
            for group in range(len(distinct))
        ]
        num_targets = reshard.costs.shape[1]
        z = np.arange(len(costs), len(costs) + len(distinct) * num_targets).reshape(
            len(distinct), num_targets
        )
        costs += [float(each) for each in distinct[:, :num_targets].ravel()]
        sizes += [float(each) for each in distinct[:, num_targets:].ravel()]
        impossible += [int(each) for each in z[~np.isfinite(distinct[:, :num_targets])]]
        rows += _rows_of(reshard, first, producers, z)
    if np.isfinite(limit):
        scale = max(sizes) or 1.0  # solvers expect numbers near 1
        rows.append((list(range(len(sizes))), [size / scale for size in sizes], -np.inf, limit / scale))
    result = _solved([cost if np.isfinite(cost) else 0.0 for cost in costs], rows, count, impossible, first)
    stopped, found = result.status == 1, result.x
    if found is None and stopped:
        raise OutOfTimeError
    if found is None:
        return None
    values = [int(np.argmax(found[start:stop])) for start, stop in itertools.pairwise(first)]
    return MilpSolution(values, float(np.dot(np.where(np.isfinite(costs), costs, 0.0), found)), stopped)


def _rows_of(reshard: Reshard, first: Any, producers: Sequence[list[int]], z: Any) -> list[Row]:
    rows: list[Row] = []
    for group, variables in enumerate(producers):
        rows += [
            ([int(each), *variables], [1.0, *[-1.0] * len(variables)], -np.inf, 0.0) for each in z[group]
        ]
    rows += [
        ([int(each) for each in z[:, target]], [1.0] * len(producers), 1.0, np.inf)
        for target in np.flatnonzero(reshard.always)
    ]
    for user, wants in reshard.wants.items():
        for target in np.flatnonzero(wants.any(axis=0)):
            wanting = [int(first[user]) + int(value) for value in np.flatnonzero(wants[:, target])]
            rows.append(
                (
                    [*map(int, z[:, target]), *wanting],
                    [*[1.0] * len(producers), *[-1.0] * len(wanting)],
                    0.0,
                    np.inf,
                )
            )
        if wants.any(
            axis=1
        ).all():  # Every value of this variable wants some target: implied for integers, and tightens the relaxation.
            targets = np.flatnonzero(wants.any(axis=0))
            for group, variables in enumerate(producers):
                rows.append(
                    (
                        [*map(int, z[group, targets]), *variables],
                        [*[1.0] * len(targets), *[-1.0] * len(variables)],
                        0.0,
                        np.inf,
                    )
                )
    return rows


def _solved(
    costs: Sequence[float], rows: Sequence[Row], count: int, impossible: Sequence[int], first: Any
) -> Any:
    # importing takes most of a second, and few processes need it
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    factors = [factor for _, each, _, _ in rows for factor in each]
    row_of = [number for number, (variables, _, _, _) in enumerate(rows) for _ in variables]
    columns = [variable for variables, _, _, _ in rows for variable in variables]
    matrix = coo_matrix((factors, (row_of, columns)), shape=(len(rows), len(costs))).tocsr()
    limits = LinearConstraint(matrix, [low for _, _, low, _ in rows], [high for _, _, _, high in rows])  # type: ignore[arg-type]
    # One value of each variable is taken, so its cheapest is paid anyway. Without it the solver's gap refers
    # to what can be saved.
    excess = np.array(costs)
    for start, stop in itertools.pairwise(first):
        excess[start:stop] -= excess[start:stop].min()
    most = np.ones(len(costs))
    most[list(impossible)] = 0.0
    return milp(
        excess / max(excess.max(), 1e-30),
        constraints=limits,
        integrality=(np.arange(len(costs)) < count).astype(int),
        bounds=Bounds(np.zeros(len(costs)), most),  # type: ignore[arg-type]
        options={"mip_rel_gap": GAP, "time_limit": SECONDS},
    )

"""Constants of a cluster fitted on a table: those with the least mean relative error of its rows, and the error on models left out.

python benchmarks/planner/fit.py "NCCL all-reduce" v100-32gb-sxm host.base_seconds host.step_seconds host.link_bytes_per_second
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from meshloom.clusters.cluster import changed, named
from meshloom.core.errors import MachineError

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from measured_tables import TABLES, Row

IMPOSSIBLE = 1e9
STARTS = (1.0, 0.5, 2.0)  # times the values in the file


def main() -> int:
    parser = argparse.ArgumentParser(description="Fit constants of a cluster on a table.")
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("cluster")
    parser.add_argument("constants", nargs="+")
    parser.add_argument("--tables", metavar="DIR", type=Path, default=Path(__file__).parent / "tables")
    arguments = parser.parse_args()
    cluster = named(arguments.cluster)

    def rows_of(values: Sequence[float]) -> list[Row]:
        other = changed(cluster, dict(zip(arguments.constants, values, strict=True)))
        rows = TABLES[arguments.table](
            arguments.tables, lambda name: other if name == other.name else named(name)
        )
        return [row for row in rows if row.cluster == other.name and not row.missing]

    begin = [cluster.constants[path].value for path in arguments.constants]
    for path, value in zip(arguments.constants, fitted(rows_of, begin, ()), strict=True):
        print(f"{path} = {value:.4g}")
    models = list(dict.fromkeys(row.model for row in rows_of(begin)))
    print(f"mean error {mean_error(rows_of(fitted(rows_of, begin, ()))):.2%}")
    if len(models) > 1:
        errors = [
            mean_error([row for row in rows_of(fitted(rows_of, begin, (out,))) if row.model == out])
            for out in models
        ]
        print(f"mean error of {', '.join(models)}, each left out: {float(np.mean(errors)):.2%}")
    return 0


def fitted(
    rows_of: Callable[[Sequence[float]], list[Row]], begin: Sequence[float], without: Sequence[str]
) -> list[float]:
    """The values with the least error of all rows but those of the models `without`; searched on logarithmic scales."""

    def error(logarithms: Sequence[float]) -> float:
        try:
            return mean_error(
                [row for row in rows_of(np.exp(logarithms).tolist()) if row.model not in without]
            )
        except MachineError:  # no value of such a constant
            return IMPOSSIBLE

    found = [minimize(error, np.log(np.array(begin) * start), method="Nelder-Mead") for start in STARTS]
    return np.exp(min(found, key=lambda each: each.fun).x).tolist()


def mean_error(rows: Sequence[Row]) -> float:
    return float(np.mean([abs(row.predicted / row.measured - 1) for row in rows]))


if __name__ == "__main__":
    sys.exit(main())

"""Predictions for clusters that are not here beside published measurements: one record a table with its scores, and one a row.

    python benchmarks/planner/main.py --json -

Scores: mean, 90th percentile and mean signed value of the relative error, and the rank correlation (Spearman), each beside that of a
naive baseline that knows one constant. Rows that cannot be expressed are counted and listed with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from meshloom.clusters.cluster import named

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from measured_tables import TABLES, Row
from records import write_records
from training_runs import RUN_TABLES


def main() -> int:
    parser = argparse.ArgumentParser(description="Predictions beside published measurements.")
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument(
        "--tables",
        metavar="DIR",
        type=Path,
        default=Path(__file__).parent / "tables",
        help="folder of the tables",
    )
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    for name, rows_of in {**TABLES, **RUN_TABLES}.items():
        rows = list(rows_of(arguments.tables, named))
        for cluster in dict.fromkeys(row.cluster for row in rows):
            scores = score([row for row in rows if row.cluster == cluster])
            print(f"{name}, {cluster}: {scores}", file=sys.stderr)
            records.append({"table": name, "cluster": cluster, **scores})
        records += [record_of(name, row) for row in rows]
    write_records(records, arguments.json)
    return 0


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the rows that can be expressed, in percent of what was measured."""
    scored = [row for row in rows if not row.missing]
    return {
        "rows": len(rows),
        "missing": len(rows) - len(scored),
        **_errors([(row.predicted, row.measured) for row in scored], ""),
        **_errors([(row.naive, row.measured) for row in scored], "naive_"),
        "fitted_on_these_rows": sorted({path for row in scored for path in row.fitted}),
    }


def _errors(pairs: Sequence[tuple[float, float]], prefix: str) -> dict[str, float]:
    predicted, measured = np.array(pairs).T
    errors = predicted / measured - 1
    scores = {
        "mean_percent": np.abs(errors).mean() * 100,
        "p90_percent": np.quantile(np.abs(errors), 0.9) * 100,
        "signed_percent": errors.mean() * 100,
        "rank_correlation": np.corrcoef(rankdata(predicted), rankdata(measured))[0, 1],
    }
    return {prefix + name: round(float(value), 3) for name, value in scores.items() if np.isfinite(value)}


def record_of(table: str, row: Row) -> dict[str, Any]:
    if row.missing:
        return {
            "table": table,
            "row": row.name,
            "cluster": row.cluster,
            "measured": row.measured,
            "missing": row.missing,
        }
    return {
        "table": table,
        "row": row.name,
        "cluster": row.cluster,
        "measured": row.measured,
        "predicted": row.predicted,
        "error_percent": round((row.predicted / row.measured - 1) * 100, 2),
        "naive_error_percent": round((row.naive / row.measured - 1) * 100, 2),
    }


if __name__ == "__main__":
    sys.exit(main())

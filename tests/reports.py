"""What tests ask of a verification's report beyond that it passed."""

from __future__ import annotations

import io

from rich.console import Console

from meshloom.verify.findings import Report, print_report

EXACT = 1e-10  # in float64


def largest_error(report: Report, kind: str | None = None) -> float:
    """Of all that is compared, or of one kind, but for what is rounding alone: a gradient that is zero because large terms
    cancel, as that of a bias before a batch norm, has an error of its own size, and the updates of an optimizer that computes
    in less than float64 its rounding; their tolerances say so."""
    errors = [error for step in report.steps for error in step.errors if kind is None or error.kind == kind]
    found = [error.error for error in errors if error.tolerance <= EXACT]
    assert len(found) > 0.3 * len(errors)
    return max(found)


def text_of(report: Report) -> str:
    """As it is printed."""
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    return stream.getvalue()

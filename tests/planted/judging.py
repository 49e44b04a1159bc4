"""What verification says of a planted bug: whether it is caught, named, and placed in the right module."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console

from meshloom.core.errors import MeshloomError
from meshloom.verify.findings import Report, print_report
from tests.planted.bugs import Bug, whole


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """module_right: False where there is none to name."""

    caught: bool
    named: bool
    module_right: bool
    said: str


def judged(
    bug: Bug, patch: pytest.MonkeyPatch, dtype: torch.dtype | None = None, run: Callable[..., Report] = whole
) -> Judgement:
    """Plant and verify by `run`, in the job's own precision or `dtype`. A run that ends in one of the product's own errors is caught as well, and named by it."""
    bug.plant(patch)
    try:
        report = run(bug.job, bug.plan, dtype)
    except MeshloomError as error:
        return Judgement(
            caught=True, named=True, module_right=bug.module is not None, said=f"error: {error}"[:200]
        )
    between = [each for each in report.between if not each.passed]
    wrong = report.first_wrong or next(iter(between), None)
    first = wrong.first_module if wrong else None
    found = report.causes or [cause for each in between for cause in each.causes]
    # "resuming" and "epoch" say where in the run it happens
    causes = [cause for cause in found if cause.kind not in ("resuming", "epoch")]
    named = any(cause.kind in bug.causes for cause in causes[:1] if cause.kind != "unknown")
    named = named or bool(bug.says and bug.says in " ".join(text_of(report).split()))
    said = "; ".join(f"{cause.kind}: {cause.sentence}" for cause in found)
    return Judgement(
        caught=not report.passed, named=not report.passed and named, module_right=bug.module is not None and first == bug.module,
        said=f"[{first}] {said}",
    )  # fmt: skip


def text_of(report: Report) -> str:
    """As it is printed."""
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    return stream.getvalue()

"""Bugs as wrong contracts of the package, the jobs that they show in, and where verification finds the first difference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from meshloom.verify.findings import Report
from tests.planted.jobs import JOBS
from tests.verified import report_on

Patch = pytest.MonkeyPatch
BUGS: dict[str, Bug] = {}  # by name in the list


@dataclass(frozen=True, kw_only=True)
class Bug:
    """plant: makes a function or method of the package wrong. phase: one of `phases_of` the report. module: the first module that is
    wrong; None: it has none. quick: one of those that `make test` runs."""

    plant: Callable[[Patch], None]
    job: str
    plan: str
    phase: str
    module: str | None
    quick: bool


def bug(
    name: str, job: str, plan: str, *, phase: str = "step 0", module: str | None = None, quick: bool = False
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Adds the function that plants it to `BUGS`."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[name] = Bug(plant=plant, job=job, plan=plan, phase=phase, module=module, quick=quick)
        return plant

    return add


def verified(job: str, plan: str) -> Report:
    """The job verified at the defaults; programs that a bug has changed are not kept."""
    return report_on(JOBS[job](), plan, transport="gloo", quick=False, cache="off", steps=3, dtype=None)


def phases_of(report: Report) -> list[str]:
    """What differs: the first step that does, as "step N", then "evaluation" or "checkpoint", whichever do."""
    step = [f"step {report.first_wrong.step}"] if report.first_wrong else []
    between = [each.what.removeprefix("the ").split()[0] for each in report.between if not each.passed]
    return [*step, *dict.fromkeys(between)]


def module_of(report: Report) -> str | None:
    """The first module that is wrong, if there is one."""
    wrong = report.first_wrong or next(each for each in report.between if not each.passed)
    return wrong.first_module


def wrap(patch: Patch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """`owner.name` becomes `wrong`, whose first argument is what was there; of a function of a module in every module that has
    imported it."""
    right = getattr(owner, name)

    def wrapped(*given: Any, **settings: Any) -> Any:
        return wrong(right, *given, **settings)

    patch.setattr(owner, name, wrapped)
    for module in [each for path, each in sys.modules.items() if path.startswith("meshloom")]:
        if getattr(module, name, None) is right:
            patch.setattr(module, name, wrapped)

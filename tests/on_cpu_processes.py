"""Jobs verified at the defaults on CPU processes, under one plan after the other: the ranks stay, as what they import takes as
long as what they verify."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.machine import with_fast_links
from tests.planted.judging import text_of
from tests.processes import on_ranks

# Plans of one number of ranks; a job is verified under all of them.
PLANS = {2: ("dp=2", "tp=2", "pp=2,microbatches=2", "dp=2,zero=2"), 4: ("dp=2,tp=2", "dp=2,pp=2")}
SECONDS = 200.0  # of one verification


@dataclass(frozen=True)
class Outcome:
    """Of one verification. dtype: of both sides; None: the job's own. owned: the largest share of the trainable elements that one
    rank updates. said: all that is printed, if the two differ."""

    plan: str
    dtype: torch.dtype | None
    owned: float
    said: str


def cases(names: Iterable[str], covering: Collection[tuple[str, int]]) -> Iterator[Any]:
    """Each job with each number of ranks, as parameters of a test; slow but for those of `covering`."""
    for name in names:
        for ranks, plans in PLANS.items():
            marks = [pytest.mark.timeout(2 * SECONDS * len(plans))]
            marks += [] if (name, ranks) in covering else [pytest.mark.slow]
            yield pytest.param(name, ranks, marks=marks, id=f"{name}-{ranks}")


def divided_readily(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Links are fast, so that all that can be is divided, and what is read is kept, as a verification reads a loss three times.
    directory: an empty one."""
    with_fast_links(monkeypatch, directory)
    monkeypatch.setenv("MESHLOOM_CACHE", str(directory / "cache"))


def check_equal(
    find: Callable[[str], Job],
    name: str,
    ranks: int,
    dtypes: Sequence[torch.dtype | None],
    *,
    whole: bool = False,
) -> None:
    """Verifies the job that `find`, a function at the top of a module, has by this name, under each plan of so many ranks in each
    precision. whole: where the plan leaves it open, every replica updates all of it."""
    runs = [(plan, dtype) for plan in PLANS[ranks] for dtype in dtypes]
    found = on_ranks(_verified, ranks, find, name, runs, timeout_seconds=SECONDS * len(runs))[0]
    assert [(each.plan, each.dtype) for each in found] == runs
    assert not [each.said for each in found if each.said]
    divided = [each for each in found if ("zero" if whole else "dp=2") in each.plan]
    assert all(each.owned < 1 for each in divided)  # not by replicas that do all


def _verified(
    find: Callable[[str], Job], name: str, runs: Sequence[tuple[str, torch.dtype | None]]
) -> list[Outcome]:
    found: list[Outcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torch.export warn about themselves
        for plan, dtype in runs:
            try:
                report = verify(
                    find(name), Plan.parse(plan), devices="cpu", dtype=dtype, quick=False, oversubscribe=True, timeout_seconds=SECONDS
                )  # fmt: skip
            except Exception as error:
                error.add_note(f"{name} under {plan} in {dtype or 'its own precision'}")
                raise
            if report is not None:
                equal = report.passed and not report.causes
                found.append(Outcome(plan, dtype, max(report.owned), "" if equal else text_of(report)))
    return found

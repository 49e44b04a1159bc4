"""Jobs verified at the defaults on CPU processes, under one plan after the other: the ranks stay, as what they import takes as
long as what they verify."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
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
    seconds: float
    said: str


def outcomes(
    find: Callable[[str], Job], name: str, ranks: int, dtypes: Sequence[torch.dtype | None]
) -> list[Outcome]:
    """Of the job that `find`, a function at the top of a module, has by this name, under each plan of so many ranks in each
    precision."""
    cases = [(plan, dtype) for plan in PLANS[ranks] for dtype in dtypes]
    return on_ranks(_verified, ranks, find, name, cases, timeout_seconds=SECONDS * len(cases))[0]


def _verified(
    find: Callable[[str], Job], name: str, cases: Sequence[tuple[str, torch.dtype | None]]
) -> list[Outcome]:
    found: list[Outcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torch.export warn about themselves
        for plan, dtype in cases:
            begun = time.perf_counter()
            try:
                report = verify(
                    find(name), Plan.parse(plan), devices="cpu", dtype=dtype, quick=False, oversubscribe=True, timeout_seconds=SECONDS
                )  # fmt: skip
            except Exception as error:
                error.add_note(f"{name} under {plan} in {dtype or 'its own precision'}")
                raise
            if report is not None:
                equal = report.passed and not report.causes
                said = "" if equal else text_of(report)
                found.append(Outcome(plan, dtype, max(report.owned), time.perf_counter() - begun, said))
    return found

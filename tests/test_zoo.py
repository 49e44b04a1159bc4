"""Jobs as people write them, unannotated, each under each parallelism against one device.

What has no meaning under a plan is refused, and docs/opaque.md says why; whatever else is refused, differs or fails
otherwise fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.core.errors import MeshloomError
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.zoo import jobs

JOBS = jobs()
WHOLE, PARTED = ("dp=2", "dp=2,zero=3"), ("tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2")
PLANS = (*WHOLE, *PARTED)
# job -> plans under which it is refused, and a part of the sentence; docs/opaque.md names each job
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {}
# a job of each kind of difficulty, under each plan
COVERING = {
    "contrast: moco queue": "pp=2,microbatches=2", "functions: learned step size": "tp=2", "functions: sparsemax attention": "dp=2,pp=2,tp=2",
    "generative: real nvp with invertible matrix": "tp=2", "graphs: gat": "dp=2,pp=2,tp=2", "language: crf tagger": "dp=2,zero=3",
    "meta: sparse experts": "dp=2,pp=2,tp=2", "physics: burgers pinn": "tp=2", "reinforcement: ppo": "pp=2,microbatches=2",
    "vision: switchable norm": "dp=2,pp=2,tp=2", "series: informer": "dp=2",
}  # fmt: skip

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def _cases() -> Iterator[Any]:
    for plan in PLANS:
        for name in JOBS:
            marks = [] if COVERING.get(name) == plan else [pytest.mark.slow]
            yield pytest.param(name, plan, marks=marks, id=f"{name}-{plan}")


@pytest.mark.covering("functions: sparsemax", "series: informer", "language: crf")
@pytest.mark.parametrize(("name", "plan"), [*_cases()])
def test_a_job_equals_one_device(name: str, plan: str) -> None:
    def check() -> None:
        report = verify(JOBS[name](), Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
        assert report is not None
        assert report.passed, str(report)

    plans, sentence = REFUSED.get(name, ((), ""))
    if plan in plans:
        with pytest.raises(MeshloomError, match=sentence):
            check()
    else:
        check()


def test_there_are_many_jobs_and_each_that_is_named_is_there() -> None:
    assert len(JOBS) >= 120
    assert {*REFUSED, *COVERING} <= set(JOBS)


def test_what_is_refused_stands_in_the_documents() -> None:
    text = Path("docs/opaque.md").read_text(encoding="utf-8")
    assert not [name for name in REFUSED if name not in text]

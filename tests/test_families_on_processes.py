"""Every family verified at the defaults on CPU processes, dropout on, under plans of every kind and in two precisions: none is
said to differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.core.job import Job
from tests.families import FAMILIES
from tests.families.limits import FLOAT32_ONLY
from tests.machine import with_fast_links
from tests.on_cpu_processes import PLANS, SECONDS, outcomes

SAMPLES, STEPS = (
    6,
    12,
)  # of a batch, that divide over replicas and microbatches; and of the run, so that epochs end
COVERING = {("two_towers", 4)}

pytestmark = [pytest.mark.long, pytest.mark.processes]


def job_of(name: str) -> Job:
    return replace(FAMILIES[name].make_job(True), batch_size=SAMPLES, steps=STEPS)


def _cases() -> Iterator[Any]:
    for name in FAMILIES:
        for ranks, plans in PLANS.items():
            marks = [pytest.mark.timeout(2 * SECONDS * len(plans))]
            marks += [] if (name, ranks) in COVERING else [pytest.mark.slow]
            yield pytest.param(name, ranks, marks=marks, id=f"{name}-{ranks}")


@pytest.mark.parametrize(("name", "ranks"), [*_cases()])
def test_a_family_is_equal(name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fast_links(monkeypatch, tmp_path)  # so that all that can be is divided
    monkeypatch.setenv("MESHLOOM_CACHE", str(tmp_path / "cache"))  # a verification reads a loss three times
    dtypes = (None,) if name in FLOAT32_ONLY else (None, torch.float64)
    found = outcomes(job_of, name, ranks, dtypes)
    assert len(found) == len(PLANS[ranks]) * len(dtypes)
    assert not [each.said for each in found if each.said]

"""Every family verified at the defaults on CPU processes, dropout on, under plans of every kind and in two precisions: none is
said to differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshloom.core.job import Job
from tests.families import FAMILIES
from tests.families.limits import FLOAT32_ONLY
from tests.on_cpu_processes import cases, check_equal, divided_readily

SAMPLES = 6  # of a batch, that divide over replicas and microbatches
STEPS = 12  # so that epochs end
COVERING = {("two_towers", 4)}

pytestmark = [pytest.mark.long, pytest.mark.processes]


def job_of(name: str) -> Job:
    return replace(FAMILIES[name].make_job(True), batch_size=SAMPLES, steps=STEPS)


@pytest.mark.parametrize(("name", "ranks"), [*cases(FAMILIES, COVERING)])
def test_a_family_is_equal(name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided_readily(monkeypatch, tmp_path)
    check_equal(job_of, name, ranks, (None,) if name in FLOAT32_ONLY else (None, torch.float64))

"""On a device that is not the CPU a step gives the CPU's values, and its hosts wait as seldom as docs/devices.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.second_device.device import missing
from tests.second_device.plans import PLANS, Rehearsed

pytestmark = [
    pytest.mark.processes,  # the device is there for the life of a process
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]


def found_of(cases: Sequence[Rehearsed]) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.second_device", *(each.name for each in cases)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(cases: Sequence[Rehearsed]) -> None:
    found = found_of(cases)
    assert set(found) == {each.name for each in cases}
    for case in cases:
        mine = found[case.name]
        assert "problem" not in mine, f"{case.name}: {mine['problem']}"
        assert mine["error"] <= case.tolerance, f"{case.name}: {mine['error']}"
        assert mine["waits"] <= case.waits and mine["in_chunks"] == 0, f"{case.name}: {mine['where']}"
        assert mine["left"] > 0 or not case.overlaps, f"{case.name}: {mine['where']}"


@pytest.mark.slow
def test_a_covering_handful_of_plans():
    check([each for each in PLANS if each.quick])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_all_other_plans(number: int):
    check([each for each in PLANS if not each.quick][number::6])

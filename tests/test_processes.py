"""Plans on processes equal one device: every two settings; every three in the slow tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshloom.core.mesh import Mesh
from meshloom.launch.processes.launcher import run_ranks
from tests.covering import Case
from tests.matrix import SETTINGS, covering_cases, thorough_cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "dp", [pytest.param(dp, marks=() if dp == 3 else pytest.mark.slow) for dp in SETTINGS["dp"] if dp > 1]
)
def test_a_plan_on_processes_equals_one_device(
    dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        _on_processes([case for case in covering_cases() if case["dp"] == dp], dp, tmp_path, monkeypatch)
        == []
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dp", [dp for dp in SETTINGS["dp"] if dp > 1])
def test_every_three_settings_on_processes_equal_one_device(
    dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        _on_processes([case for case in thorough_cases() if case["dp"] == dp], dp, tmp_path, monkeypatch)
        == []
    )


def _on_processes(cases: list[Case], dp: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What differs when the same rank processes verify all cases."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file, result = directory / "cases.json", directory / "result.json"
    file.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.matrix_ranks", str(file), str(result)]
    assert run_ranks(command, Mesh(dp=dp), "cpu", "") == 0
    return json.loads(result.read_text())

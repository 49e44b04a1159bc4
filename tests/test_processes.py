"""Plans on processes equal one device: every pair of settings; every combination in the slow tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshloom.launch import run_ranks
from meshloom.mesh import Mesh
from tests.matrix import SETTINGS, Case, all_cases, covering_cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("dp", [pytest.param(dp, marks=() if dp in (3, 4) else pytest.mark.slow) for dp in SETTINGS["dp"] if dp > 1])
def test_a_plan_on_processes_equals_one_device(dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _on_processes([case for case in covering_cases() if case["dp"] == dp], dp, tmp_path, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", SETTINGS["model"])
@pytest.mark.parametrize("dp", [dp for dp in SETTINGS["dp"] if dp > 1])
def test_every_plan_on_processes_equals_one_device(dp: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in all_cases() if case["dp"] == dp and case["model"] == model]
    assert _on_processes(cases, dp, tmp_path, monkeypatch) == []


def _on_processes(cases: list[Case], dp: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What differs when the same rank processes verify all cases."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file, result = directory / "cases.json", directory / "result.json"
    file.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.matrix_ranks", str(file), str(result)]
    assert run_ranks(command, Mesh(dp=dp), "cpu", "") == 0
    return json.loads(result.read_text())

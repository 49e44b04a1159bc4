"""`make gpu` calls nothing passed that has not run on a GPU, and its exit status says whether something
failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1] / "benchmarks/gpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, which is no module of a package."""
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("main", "page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import main as program

    for name in ("main", "page"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # so that it goes when the test is over
    return program


def rows_of(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str
) -> tuple[int, Any, str]:
    """The exit status, the record and the page of a run on the CPU whose parts find one row each."""

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).write_text(
            json.dumps({"name": "a | b", "status": status, "text": "1 of 2", "figures": {}}) + "\n"
        )
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(program.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["main.py", "--device", "cpu", "--out", str(tmp_path)])
    code = program.main()
    return code, json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()


def test_what_went_well_without_a_gpu_is_not_run(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, record, page = rows_of(gpu, monkeypatch, tmp_path, "passed")
    assert code == 0
    assert [part["part"] for part in record["parts"]] == list(gpu.PARTS)
    assert {row["status"] for part in record["parts"] for row in part["rows"]} == {"not run"}
    assert (
        f"0 passed, 0 failed, 0 refused, {len(gpu.PARTS)} not run." in page
        and "| a \\| b | not run | needs a GPU; rehearsed on the CPU: 1 of 2 |" in page
    )


def test_on_a_gpu_it_is_what_it_is(gpu: Any):
    row = {"status": "passed", "text": "1 of 2"}
    assert gpu.as_found_on("cuda", row) == row
    assert gpu.as_found_on("cpu", {**row, "status": "failed"})["status"] == "failed"


def test_a_failure_is_an_exit_status(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert rows_of(gpu, monkeypatch, tmp_path, "failed")[0] == 1
    assert "failed: a | b: 1 of 2" in capsys.readouterr().err


def test_a_part_that_takes_too_long_or_ends_badly_has_failed_and_keeps_its_rows(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
):
    def slow(command: list[str], **settings: Any) -> Any:
        Path(command[-1]).write_text(
            json.dumps({"name": "first", "status": "passed", "text": "", "figures": {}}) + "\n"
        )
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(gpu.subprocess, "run", slow)
    assert [(row["name"], row["status"]) for row in gpu._run("losses", "cuda")["rows"]] == [
        ("first", "passed"),
        ("losses", "failed"),
    ]
    told = gpu._run("losses", "cuda", 40)["rows"][-1]["text"]
    assert told == "took longer than 40 s: make gpu SECONDS=80 gives it more"
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda command, **settings: subprocess.CompletedProcess(command, 0, "")
    )
    assert [(row["status"], row["text"]) for row in gpu._run("losses", "cuda")["rows"]] == [
        ("failed", "gave nothing")
    ]


def test_what_cannot_be_tried_is_one_sentence(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    assert gpu._problem("cpu", ["speed"]) == f"There is no part speed. Use {', '.join(gpu.PARTS)}."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu._problem("cuda", []).startswith("No GPU is visible.") and gpu._problem("cpu", []) == ""
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert (
        gpu._problem("cuda", [])
        == "These packages are missing: no_such_package. Give a folder with their wheels: make gpu WHEELS=DIR."
    )


@pytest.mark.slow
@pytest.mark.processes
def test_the_rehearsal_runs_on_a_cpu(tmp_path: Path):
    words = [
        str(ROOT / "main.py"),
        "--device",
        "cpu",
        "--parts",
        "memory",
        "checkpoints",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["status"] for part in record["parts"] for row in part["rows"]} == {"not run"}

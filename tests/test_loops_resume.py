"""A loop of one's own goes on in the middle of an epoch, under another plan and with its workers, as if it had never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("resumed_loop.py")
FIRST, LAST = 11, 15  # an epoch has 8 batches, the last of one sample


def _run(plan: str, *words: object) -> None:
    command = [sys.executable, "-m", "meshloom", "run", str(SCRIPT), "--plan", plan, "--", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def _state(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("straight") / "last.pt"
    _run("dp=1", LAST, path)
    return _state(path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("dp=2", "dp=3"),
        pytest.param("dp=2,zero=3", "dp=2", marks=pytest.mark.slow),
        pytest.param("dp=3", "dp=2,zero=1", marks=pytest.mark.slow),
        pytest.param("tp=2", "dp=2,zero=3", marks=pytest.mark.slow),
        pytest.param("dp=2", "tp=2", marks=pytest.mark.slow),
        pytest.param("pp=2,microbatches=2", "dp=2", marks=pytest.mark.slow),
        pytest.param("dp=2", "pp=2", marks=pytest.mark.slow),
        pytest.param("dp=2", "dp=1", marks=pytest.mark.slow),
        pytest.param("dp=2", "dp=2,tp=2,zero=2", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,zero=1", "dp=2", marks=pytest.mark.slow),
    ],
)
def test_a_loop_goes_on_under_another_plan(first: str, then: str, straight: dict[str, Any], tmp_path: Path):
    middle, last = tmp_path / "middle.pt", tmp_path / "last.pt"
    _run(first, FIRST, middle)
    _run(then, LAST, last, middle)
    found = _state(last)
    torch.testing.assert_close(found["model"], straight["model"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        found["optimizer"]["state"], straight["optimizer"]["state"], rtol=1e-9, atol=1e-12
    )
    assert found["done"] == straight["done"] == LAST
    assert all(found["loader"][each] == straight["loader"][each] for each in ("epoch", "batches"))

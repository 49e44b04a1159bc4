"""What is measured has every kind in both directions, and more work takes more time. How fast anything is, no test says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from meshloom.cli import main
from meshloom.cluster import COLLECTIVES, KINDS, load
from meshloom.planner.calibrate import machine_of, measure_operators


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.long
def test_every_kind_is_measured_forward_and_backward():
    machine = machine_of(measure_operators(torch.device("cpu"), seconds=0.05), (), torch.device("cpu"), cores=1)
    assert {(each.kind, each.backward) for each in machine.operations} == {(kind, backward) for kind in KINDS for backward in (False, True)}
    assert {each.dtype for each in machine.operations if each.kind == "matmul"} == {"float32", "bfloat16"}
    for each in machine.operations:
        works, seconds = zip(*each.points, strict=True)
        assert list(works) == sorted(works)
        assert list(seconds) == sorted(seconds)
        # A thousand times the work, and a machine that does not take twice the time, would be broken measuring.
        assert works[-1] < 1000 * works[0] or seconds[-1] > 2 * seconds[0]
    assert machine.memory_bytes > 2**28 and machine.threads == torch.get_num_threads()


@pytest.mark.processes
@pytest.mark.long
def test_two_ranks_measure_their_links_and_write_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path, records = tmp_path / "machine.json", tmp_path / "records"
    assert main(["calibrate", "--devices", "cpu", "--ranks", "2", "--out", str(path), "--json", str(records)]) == 0
    machine = load(path)
    assert [link.collective for link in machine.links] == list(COLLECTIVES)
    assert {link.ranks for link in machine.links} == {2}
    text = capfd.readouterr().out
    assert f"written to {path}" in text
    assert "measured just now" in text
    assert "25 MiB over 2 ranks, " in text
    events = [json.loads(line)["event"] for line in records.read_text().splitlines()]
    assert events == ["machine", *["operator"] * len(machine.operations), *["link"] * 6, *["all_reduce"] * 4]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "--ranks 0 must be 1 or more"),
        (["--devices", "cuda", "--ranks", "64"], "needs 64 GPUs"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_2(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", *words]) == 2
    assert sentence in capsys.readouterr().err

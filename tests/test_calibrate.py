"""What is measured has every kind in both directions, and more work takes more time. How fast anything is, no
test says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rehearsals import machine as example

from meshloom.cli.main import main
from meshloom.core.errors import PlanError
from meshloom.machine.links import COLLECTIVES
from meshloom.machine.machine import KINDS, load, save
from meshloom.measure.calibration import CalibrationRequest, numbers_of_ranks
from meshloom.planner.measure.machine_measurement import machine_of, measure_operators

pytestmark = pytest.mark.usefixtures("own_path")


@pytest.mark.slow
def test_every_kind_is_measured_forward_and_backward():
    machine = machine_of(
        measure_operators(torch.device("cpu"), seconds=0.05), (), torch.device("cpu"), cores=1
    )
    assert {(each.kind, each.backward) for each in machine.operations} == {
        (kind, backward) for kind in KINDS for backward in (False, True)
    }
    assert {each.dtype for each in machine.operations if each.kind == "matmul"} == {"float32", "bfloat16"}
    for each in machine.operations:
        works, seconds = zip(*each.points, strict=True)
        assert list(works) == sorted(works)
        assert list(seconds) == sorted(seconds)
        # A thousand times the work, and a machine that does not take twice the time, would be broken
        # measuring.
        assert works[-1] < 1000 * works[0] or seconds[-1] > 2 * seconds[0]
    assert machine.memory_bytes > 2**28 and machine.threads == torch.get_num_threads()


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks_measure_their_links_and_write_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path, records = tmp_path / "machine.json", tmp_path / "records"
    assert (
        main(["calibrate", "--devices", "cpu", "--ranks", "2", "--out", str(path), "--json", str(records)])
        == 0
    )
    machine = load(path)
    apart = [link.collective for link in machine.links if not link.in_place and not link.algorithm]
    assert apart == list(COLLECTIVES)
    assert [link.algorithm for link in machine.links if link.algorithm] == ["ring"]
    assert {(link.ranks, link.among, link.place) for link in machine.links} == {(2, 2, "inside")}
    assert all(len(link.points) == 4 for link in machine.links)
    assert machine.ranks == 2 and machine.transport in ("shm", "gloo")
    assert {link.collective for link in machine.links if link.in_place} == (
        {"all_reduce", "reduce_scatter"} if machine.transport == "shm" else set()
    )
    text = capfd.readouterr().out
    assert f"written to {path}" in text
    assert "measured just now" in text
    assert f"collectives over {machine.transport}" in text and "residual" in text
    assert "25 MiB over 2 ranks, " in text
    events = [json.loads(line)["event"] for line in records.read_text().splitlines()]
    assert events == [
        "machine",
        *["operator"] * len(machine.operations),
        *["link"] * len(machine.links),
        *["all_reduce"] * 4,
    ]


@pytest.mark.processes
@pytest.mark.slow
def test_every_number_of_ranks_up_to_four_is_measured_with_its_divisors(tmp_path: Path):
    path = tmp_path / "machine.json"
    assert (
        main(["calibrate", "--devices", "cpu", "--ranks", "4", "--transport", "gloo", "--out", str(path)])
        == 0
    )
    machine = load(path)
    assert machine.transport == "gloo"
    assert {(link.ranks, link.among) for link in machine.links} == {(2, 2), (3, 3), (4, 4), (2, 4)}
    assert not [link for link in machine.links if link.in_place]


def test_all_numbers_of_ranks_up_to_four_are_measured_then_powers_of_two_and_the_most():
    assert numbers_of_ranks(6) == [2, 3, 4, 6]


def test_how_much_ranks_slow_each_other_down_is_left_out_of_a_file_of_earlier_versions(tmp_path: Path):
    save(example(), path := tmp_path / "machine.json")
    crowd = {"ranks": 2, "threads": 1, "compute": 1.1, "memory": 1.3}
    path.write_text(json.dumps({**json.loads(path.read_text()), "crowds": [crowd]}))
    assert load(path) == example()


def test_a_request_for_no_ranks_is_refused():
    with pytest.raises(PlanError, match="--ranks 0 must be 1 or more"):
        CalibrationRequest(ranks=0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "--ranks 0 must be 1 or more"),
        (["--devices", "cuda", "--ranks", "64"], "needs 64 GPUs"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["calibrate", *words]) == 2
    assert sentence in capsys.readouterr().err

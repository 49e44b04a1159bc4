"""A machine's measurements become seconds by interpolation, and travel as JSON whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshloom.core.errors import MachineError
from meshloom.machine.machine import (
    Operation,
    collective_seconds,
    example_machine,
    load,
    operator_seconds,
    save,
)

MACHINE = example_machine()


def with_operation(**values: Any) -> Operation:
    return Operation(
        **{
            "kind": "matmul",
            "dtype": "float32",
            "backward": False,
            "points": ((1e3, 1e-6), (1e6, 1e-4)),
            **values,
        }
    )


def test_seconds_are_those_measured_at_the_points():
    operation = with_operation(points=((1e3, 1e-6), (1e6, 1e-4), (1e9, 0.05)))
    machine = replace(
        MACHINE,
        operations=(
            operation,
            *(each for each in MACHINE.operations if (each.kind, each.backward) != ("matmul", False)),
        ),
    )
    for work, seconds in operation.points:
        assert operator_seconds(machine, "matmul", "float32", flops=work) == pytest.approx(seconds, rel=1e-9)
    # Half way on both logarithmic scales.
    assert operator_seconds(machine, "matmul", "float32", flops=10**4.5) == pytest.approx(1e-5, rel=1e-9)
    # Beyond: the last rate. Before: what a call costs.
    assert operator_seconds(machine, "matmul", "float32", flops=4e9) == pytest.approx(0.2, rel=1e-9)
    assert operator_seconds(machine, "matmul", "float32", flops=1) == pytest.approx(1e-6, rel=1e-9)


def test_a_product_of_few_rows_takes_as_long_as_its_bytes():
    assert operator_seconds(MACHINE, "matmul", "float32", flops=1e6, num_bytes=1e9) == pytest.approx(1.0)
    assert operator_seconds(MACHINE, "matmul", "float32", flops=1e9, num_bytes=1e6) == pytest.approx(1.0)


def test_a_dtype_that_was_not_measured_takes_one_of_its_width_or_float32():
    half = with_operation(dtype="bfloat16")
    machine = replace(MACHINE, operations=(*MACHINE.operations, half))
    assert machine.operation("matmul", "float16") is half
    assert machine.operation("matmul", "float64").dtype == "float32"
    assert machine.operation("softmax", "bfloat16").dtype == "float32"


def test_a_machine_survives_its_file(tmp_path: Path):
    save(MACHINE, tmp_path / "deep" / "machine.json")
    assert load(tmp_path / "deep" / "machine.json") == MACHINE
    save(replace(MACHINE, name="other"), tmp_path / "deep" / "machine.json")
    assert load(tmp_path / "deep" / "machine.json").name == "other"
    # nothing temporary is left
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["machine.json"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written to .*Give another file with --out"):
        save(MACHINE, tmp_path / "file" / "machine.json")


def broken(tmp_path: Path, **changes: Any) -> Path:
    save(MACHINE, tmp_path / "machine.json")
    found = json.loads((tmp_path / "machine.json").read_text())
    (tmp_path / "machine.json").write_text(json.dumps({**found, **changes}))
    return tmp_path / "machine.json"


OPERATION = {"kind": "matmul", "dtype": "float32", "backward": False, "points": [[4, 1], [5, 2]], "spread": 0}
LINK = {"collective": "send", "ranks": 2, "latency_seconds": 0, "bytes_per_second": 1, "residual": 0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schema": 99}, "has version 99 of the measurements"),
        ({"device": "tpu"}, "'tpu' is not known"),
        ({"operations": []}, "lacks measurements of matmul, attention"),
        ({"operations": [{"kind": "matmul"}]}, "is broken"),
        ({"operations": [{**OPERATION, "points": [[5, 1], [4, 2]]}]}, "ascending work"),
        ({"links": [{**LINK, "collective": "gossip"}]}, "'gossip' is not known"),
        ({"links": [{**LINK, "bytes_per_second": 0}]}, "no latency and no rate"),
        ({"links": 3}, "is broken"),
        ({"speed": 1}, "is broken"),
        ({"call_seconds": "fast"}, "was not measured"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str):
    with pytest.raises(MachineError, match=sentence) as caught:
        load(broken(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "is no JSON"), ("[1]", "does not hold"), ('{"a": 1}', "does not hold")]
)
def test_a_foreign_file_is_one_sentence(tmp_path: Path, text: str, sentence: str):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(MachineError, match=sentence):
        load(tmp_path / "other.json")
    with pytest.raises(MachineError, match="There are no measurements in .*meshloom calibrate"):
        load(tmp_path / "nothing.json")


def test_a_machine_of_one_rank_says_how_to_measure_links():
    with pytest.raises(MachineError, match="Calibrate with --ranks 2 or more"):
        collective_seconds(replace(MACHINE, links=()), "all_reduce", 1e6, 4)

"""Writes docs/devices.md: how often the host waits for its device under every kind of plan. Run as `python -m
tests.second_device.table`; with names of plans as arguments, or `--quick`, it writes JSON about these to stdout instead."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.second_device.device import SecondDevice, missing
from tests.second_device.plans import PLANS, Rehearsed
from tests.second_device.rehearsal import rehearse

FILE = Path(__file__).parents[2] / "docs" / "devices.md"
BEGIN, END = "<!-- begin: python -m tests.second_device.table -->\n", "<!-- end -->\n"
HEADER = """| | plan | model, optimizer | waits a step | a microbatch | left to do | copies to the host | from the host | where it waits |
|---|---|---|---:|---:|---:|---:|---:|---|
"""


def row(case: Rehearsed, found: Mapping[str, Any]) -> str:
    """One line of the table. found: of `Found`."""
    waited = found["waits"] > 0
    columns = [
        case.kind if case.what == "step" else f"{case.what}: {case.kind}",
        f"`{case.plan}`",
        f"{case.model}, {case.optimizer}",
        f"{found['waits']:g}",
        f"{found['in_chunks']:g}",
        f"{found['left']:.0%}" if waited else "",
        f"{found['to_host']:g}",
        f"{found['from_host']:g}",
        found["where"],
    ]
    return f"| {' | '.join(columns)} |\n"


def rows_of(text: str) -> list[str]:
    """Of the table in the document."""
    return text.split(BEGIN)[1].split(END)[0].removeprefix(HEADER).splitlines(keepends=True)


def found_of(cases: Sequence[Rehearsed]) -> dict[str, dict[str, Any]]:
    """By name; an error as its words."""
    torch.set_num_threads(1)
    device, found = SecondDevice(), dict[str, dict[str, Any]]()
    for case in cases:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[case.name] = rehearse(device, case).as_dict()
            except Exception as error:
                found[case.name] = {"problem": f"{type(error).__name__}: {error}"}
        print(case.name, found[case.name], file=sys.stderr, flush=True)
    return found


def main(words: Sequence[str]) -> int:
    if problem := missing():
        print(problem, file=sys.stderr)
        return 2
    chosen = [each for each in PLANS if each.name in words or (each.quick and "--quick" in words)]
    found = found_of(chosen if words else PLANS)
    if words:
        print(json.dumps(found))
        return 0
    allowed = {each.name: each.tolerance for each in PLANS}
    wrong = {
        name: each for name, each in found.items() if "problem" in each or not each["error"] <= allowed[name]
    }
    for name, each in wrong.items():
        print(f"{name}: {each}", file=sys.stderr)
    if wrong:
        return 1
    before, rest = FILE.read_text().split(BEGIN)
    rows = "".join(row(each, found[each.name]) for each in PLANS)
    FILE.write_text(before + BEGIN + HEADER + rows + END + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Rehearses plans on the second device and writes what was found as JSON: `python -m tests.second_device NAME ...`, or
`--quick` for the covering handful."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tests.second_device.device import SecondDevice, missing
from tests.second_device.plans import PLANS
from tests.second_device.rehearsal import rehearse


def main(words: Sequence[str]) -> int:
    if problem := missing():
        print(problem, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    device, found = SecondDevice(), dict[str, dict[str, Any]]()
    for case in [each for each in PLANS if each.name in words or (each.quick and "--quick" in words)]:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[case.name] = rehearse(device, case).as_dict()
            except Exception as error:
                found[case.name] = {"problem": f"{type(error).__name__}: {error}"}
        print(case.name, found[case.name], file=sys.stderr, flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

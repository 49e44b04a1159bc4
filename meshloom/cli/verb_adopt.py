"""`meshloom adopt`: a training script becomes a job, shown as a diff and proved."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from meshloom.adopt.adoption import adopt
from meshloom.core.errors import JobError
from meshloom.report.terminal import LongPhases
from meshloom.telemetry.timings import Timings


def adopt_script(arguments: argparse.Namespace) -> int:
    """Exit code: 0 if the job was found to take the script's steps, 1 if not, 2 if it could not be written."""
    script = Path(arguments.target)
    if not script.is_file() or script.suffix != ".py":
        raise JobError(f"There is no Python file {script}. Give the training script, as FILE.py.")
    timings = Timings(time.monotonic)
    with LongPhases(Console(stderr=True), takes_prints=False) as phases, phases.of(timings):
        found = adopt(
            script, arguments.words, target=Path(arguments.to) if arguments.to else None, steps=arguments.steps, overwrite=arguments.overwrite,
            timings=timings,
        )  # fmt: skip
    if found.refusals:
        print(f"{script} cannot be adopted as it is. Nothing was written.")
        for each in found.refusals:
            print(f"  {each}")
        return 2
    for line in found.difference():
        print(line)
    print()
    for each in found.left_out:
        print(f"  {each}")
    assert found.proof is not None
    print(found.proof.told())
    words = f" -- {' '.join(arguments.words)}" if arguments.words else ""
    print(
        f"Wrote {found.target}."
        + (f" Next: meshloom verify {found.target} --plan dp=2{words}" if found.proved else "")
    )
    return 0 if found.proved else 1

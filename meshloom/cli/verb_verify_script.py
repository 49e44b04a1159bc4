"""`meshloom verify` of a script with a loop of its own: run its first steps under a plan and by itself, and compare."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from meshloom.cli.plan_lines import plan_of
from meshloom.cli.recorded_script import How, RecordedRun
from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.launch.devices import choose_devices
from meshloom.launch.processes.launcher import run_ranks
from meshloom.loops.ranks import check_of_loops
from meshloom.report.records import Records
from meshloom.verify.scripts.recorder import RecordedStep, recorded_steps
from meshloom.verify.scripts.script_comparison import ScriptComparison, compare_scripts
from meshloom.verify.scripts.script_verdict import held_by_ranks, verdict, why_no_copies
from meshloom.verify.scripts.written_files import written_by_several
from meshloom.verify.tolerances.of_precision import most_tolerated

_OF_JOBS = ("report", "repro", "bisect", "quick")
_DOING = {"plan": "under {plan}", "alone": "by itself", "copies": "as {plan} plain copies"}


def verify_script(arguments: argparse.Namespace) -> int:
    """Exit code: 0 if the plan equals the script by itself on whole batches, 1 if it differs, 2 if that could not be computed."""
    if said := [name for name in _OF_JOBS if getattr(arguments, name)]:
        raise PlanError(
            f"--{said[0]} is of jobs. A script's first steps are run under a plan and by itself, and compared."
        )
    found = compare_script(arguments)
    with ExitStack() as stack:
        for line in found.lines:
            print(line)
        plan = plan_of(arguments)
        Records(arguments.json, stack).write(
            "verify_script", plan=str(plan), exit_code=found.code, lines=found.lines
        )
    return found.code


class ScriptResult(NamedTuple):
    """lines: what is said. code: that of exit. factor: of every gradient of the first step that differs, where there is one. normalizes: whether a module
    does, by the statistics of its batch."""

    lines: list[str]
    code: int
    factor: float | None = None
    normalizes: bool = False


def compare_script(arguments: argparse.Namespace) -> ScriptResult:
    """Run the script's first steps under the plan and by itself. Raises `PlanError` for plans of jobs, and of one rank."""
    plan = plan_of(arguments)
    check_of_loops(plan)
    if plan.mesh.size == 1:
        raise PlanError(f"{plan} is the script by itself. Give a plan of several ranks, like --plan dp=2.")
    with tempfile.TemporaryDirectory(prefix="meshloom-") as root:
        try:
            return _compared(_Runs(arguments, plan, Path(root)), plan)
        except _NotComputedError as error:
            return ScriptResult([str(error)], 2)


def _compared(runs: _Runs, plan: Plan) -> ScriptResult:
    alone = runs.alone()
    if not alone.steps:
        raise _NotComputedError(
            "NOTHING WAS COMPARED: the script made no step of an optimizer of torch's, and no backward. Its own words follow --."
        )
    under_plan = runs.recorded("plan", plan)
    lowest = min(
        (runs.dtype, *alone.notes["lowered"]), key=lambda name: torch.finfo(getattr(torch, name)).bits
    )
    tolerance = most_tolerated(getattr(torch, lowest))
    whole = compare_scripts(under_plan.steps, alone.steps, tolerance)
    if not whole.tensors:
        raise _NotComputedError(
            "NOTHING WAS COMPARED: no parameter of the first steps has a gradient, and none is in an optimizer."
        )
    copies: ScriptComparison | str | None = None
    if whole.first is not None and plan.dp > 1:
        of_copies = {name: alone.notes[name] for name in ("draws", "weighs", "batch_norms")}
        copies = why_no_copies(plan, **of_copies)
        if copies is None:
            found = runs.recorded("copies", Plan(dp=plan.dp))
            copies = compare_scripts(under_plan.steps, found.steps, tolerance)
    lines = verdict(
        plan, whole, copies, drew=runs.draws, draws=alone.notes["draws"], batch_norms=alone.notes["batch_norms"]
    )  # fmt: skip
    if lowest != "float64":
        lines.append(
            f"It computes in {lowest}, so differences of up to {tolerance:.0e} were taken for rounding."
        )
    lines.append(held_by_ranks(under_plan.held))
    lines += [f"Written or removed by several ranks: {each}." for each in under_plan.shared_files]
    factor = whole.first.factor if whole.first else None
    return ScriptResult(lines, int(not whole.equal), factor, bool(alone.notes["batch_norms"]))


class _NotComputedError(Exception):
    """The message is complete for the user."""


class _Recorded(NamedTuple):
    """notes: of the main rank. shared_files: that several ranks have written. held: by each rank, shares of parameters and of optimizers' state."""

    steps: list[RecordedStep]
    notes: dict[str, Any]
    shared_files: list[str]
    held: list[tuple[float, float]]


class _Runs:
    """The runs of one verification, with files in `root`. dtype, draws: of those from now on."""

    def __init__(self, arguments: argparse.Namespace, plan: Plan, root: Path) -> None:
        self._arguments, self._root = arguments, root
        self.dtype: Literal["float64", "float32"] = arguments.dtype or "float64"
        self.draws = True
        kind, _ = choose_devices(plan.mesh, arguments.devices, arguments.oversubscribe)
        self._devices = "cuda" if kind == "cuda" else "cpu"

    def alone(self) -> _Recorded:
        """The script by itself, in float64 if it can; without draws of forwards if there are some."""
        try:
            found = self.recorded("alone", Plan())
        except _NotComputedError:
            if self._arguments.dtype:
                raise
            self.dtype = "float32"
            found = self.recorded("alone", Plan())
        if found.notes["draws"]:
            self.draws = False
            found = self.recorded("alone", Plan())
        return found

    def recorded(self, how: How, plan: Plan) -> _Recorded:
        """The script's first steps, one process for each rank of `plan`."""
        arguments, directory = self._arguments, Path(tempfile.mkdtemp(dir=self._root))
        doing = _DOING[how].format(plan=plan)
        print(f"running the script {doing} ({self.dtype}{'' if self.draws else ', no draws'})", file=sys.stderr)  # fmt: skip
        run = RecordedRun(
            directory=str(directory), how=how, steps=arguments.steps, dtype=self.dtype, draws=self.draws
        )
        command = run.command(arguments.target, arguments.words)
        with _output_in(directory / "output") as output:
            code = run_ranks(
                command,
                plan.mesh,
                self._devices,
                str(plan),
                arguments.hang_seconds,
                arguments.transport,
                scripts=True,
            )
        if code > 128:
            raise SystemExit(code)
        if code:
            raise _NotComputedError(
                f"{output.read_text(errors='replace')}NOT COMPUTED: the script failed {doing} (exit code {code})."
            )
        notes = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(plan.mesh.size)]
        files = written_by_several([each["files"] for each in notes])
        return _Recorded(recorded_steps(directory), notes[0], files, [each["held"] for each in notes])


@contextmanager
def _output_in(path: Path) -> Iterator[Path]:
    """A context in which what this process and its children print goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    try:
        with (
            path.open("a", encoding="utf-8", buffering=1) as file,
            redirect_stdout(file),
            redirect_stderr(file),
        ):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield path
    finally:
        for number, each in enumerate(kept, 1):
            os.dup2(each, number)
            os.close(each)

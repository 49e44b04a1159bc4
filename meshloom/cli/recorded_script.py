"""A process of `meshloom verify SCRIPT.py`: runs the script's first steps as one of its ranks, and records them.

Arguments: what a `RecordedRun` says, as JSON; the script; its words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import meshloom
from meshloom.cli.verb_run import execute
from meshloom.core.random import seed_script
from meshloom.launch.environment import launched_rank, script_seed
from meshloom.launch.failure import leave, report_failure
from meshloom.loops import means
from meshloom.loops import parallel as loops_parallel
from meshloom.loops.execution import Execution
from meshloom.loops.parallel import execution_of
from meshloom.loops.ranks import check_met, has_ranks, leave_ranks, ranks
from meshloom.verify.scripts.copies_reference import PlainCopies
from meshloom.verify.scripts.draws_of_forwards import ForwardNotes, no_draws_within, without_draws
from meshloom.verify.scripts.recorder import (
    EnoughStepsError,
    ScriptRecorder,
    replaced,
    to_float64,
    with_hooks,
)
from meshloom.verify.scripts.written_files import ScriptFiles

How = Literal["plan", "alone", "copies"]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """directory: where steps and notes are written. how: under the plan, by itself, or as plain copies. steps: to record.
    dtype: of parameters and of what is made without one. draws: whether its forwards draw."""

    directory: str
    how: How
    steps: int
    dtype: Literal["float64", "float32"]
    draws: bool = True

    def command(self, script: str, words: Sequence[str]) -> list[str]:
        """Of each rank."""
        return [sys.executable, "-m", "meshloom.cli.recorded_script", json.dumps(asdict(self)), script, *words]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Run it, and end the process where it fails."""
    run = RecordedRun(**json.loads(arguments[0]))
    try:
        _run(run, arguments[1], arguments[2:])
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            leave(ranks().world.report(error) if has_ranks() else report_failure(error))
    leave_ranks(well=True)


def _run(run: RecordedRun, script: str, words: Sequence[str]) -> None:
    launched = launched_rank()
    rank, size = (launched.rank, launched.size) if launched else (0, 1)
    directory, dtype = Path(run.directory), getattr(torch, run.dtype)
    executions: dict[nn.Module, Execution | None] = {}
    notes = ForwardNotes()
    files = ScriptFiles(directory.parent)
    copies = PlainCopies(rank, size, directory) if run.how == "copies" else None

    def parallel(before: Any) -> Any:
        def made(
            module: nn.Module, plan: object = None, *, methods: Sequence[str] = (), **kwargs: Any
        ) -> nn.Module:
            module = getattr(module, "_orig_mod", module)  # a compiled one is run as written
            with_hooks(module, methods)
            if dtype == torch.float64:
                module.double().register_forward_pre_hook(to_float64, with_kwargs=True)
            if not run.draws:
                no_draws_within(module)
            if run.how == "alone":
                notes.watch(module, dtype)
                notes.weighs |= kwargs.get("weight") is not None
            module = copies.made(module) if copies else before(module, methods=methods, **kwargs)
            executions[module] = execution_of(module) if run.how == "plan" else None
            return module

        return made

    def reporting(before: Any) -> Any:
        def reported(*args: Any, **kwargs: Any) -> Any:
            value = before(*args, **kwargs)
            recorder.report(value)
            return value

        return reported

    torch.set_default_dtype(dtype)
    recorder = ScriptRecorder(directory if rank == 0 else None, run.steps, executions)
    with ExitStack() as stack:
        stack.enter_context(recorder)
        stack.enter_context(replaced(torch, "save", files.saving))
        stack.enter_context(nullcontext() if run.draws else without_draws())
        stack.enter_context(replaced(meshloom, "train_step", reporting))
        for owner in (meshloom, loops_parallel):  # of scripts, of adapters
            stack.enter_context(replaced(owner, "parallel", parallel))
        stack.enter_context(replaced(means, "reported", reporting))
        for owner, name in product((meshloom, means), ("mean", "sum")):
            stack.enter_context(replaced(owner, name, reporting))
        stack.callback(_write, directory / f"{rank}.json", notes, files, recorder)
        seed_script(script_seed())
        with suppress(EnoughStepsError):
            execute(script, words)
        if run.how == "plan":
            check_met()


def _write(path: Path, notes: ForwardNotes, files: ScriptFiles, recorder: ScriptRecorder) -> None:
    told = {**asdict(notes), "files": files.lines, "held": recorder.held()}
    path.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

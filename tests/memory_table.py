"""Writes the table of docs/memory.md: memory predicted and measured. Run as `python -m
tests.memory_table`."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import Memory, predict_memory
from meshloom.program.capture.capture import capture
from meshloom.program.run.execute import run_program
from tests.memory_jobs import CASES, SETTINGS, case_of

FILE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- begin: python -m tests.memory_table -->\n", "<!-- end -->\n"
HEADER = """| model | optimizer | precision | peak, predicted | program's | module's | error | phase | kept, predicted | module's |
|---|---|---|---:|---:|---:|---:|---|---:|---:|
"""


def predicted_and_measured(name: str, optimizer: str, precision: str) -> tuple[Memory, Memory, Memory]:
    """Memory of one step of a case: predicted; measured while the program runs; measured while the module
    runs."""
    case = case_of(name, precision)
    job = case.job(optimizer)
    generator = torch.Generator().manual_seed(0)
    batch, other = case.batch(generator), case.batch(generator)
    program = capture(job, (batch, other))
    by_program = replace(
        job,
        loss=lambda model, chunk: run_program(
            program, dict(model.named_parameters()), dict(model.named_buffers()), chunk
        ),
    )
    return (
        predict_memory(program, job.optimizer),
        measure_memory(by_program, [batch]),
        measure_memory(job, [batch]),
    )


def row(name: str, optimizer: str, precision: str) -> str:
    """One line of the table; bytes as KiB."""
    predicted, by_program, by_module = predicted_and_measured(name, optimizer, precision)
    error = f"{predicted.peak / by_module.peak - 1:+.2%}"
    peaks = [_kib(each.peak) for each in (predicted, by_program, by_module)]
    columns = [
        name,
        optimizer,
        precision,
        *peaks,
        error,
        by_module.phase,
        _kib(predicted.kept),
        _kib(by_module.kept),
    ]
    return f"| {' | '.join(columns)} |\n"


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.0f} KiB"


def main() -> None:
    """Measure all cases and write the table into the file."""
    torch.set_num_threads(1)
    rows: list[str] = []
    for name in CASES:
        for optimizer, precision in SETTINGS:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                rows.append(row(name, optimizer, precision))
            sys.stdout.write(rows[-1])
    before, _, rest = FILE.read_text().partition(BEGIN)
    FILE.write_text(before + BEGIN + HEADER + "".join(rows) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()

"""Writes the table of docs/memory.md: memory predicted and measured. Run as `python -m tests.memory_table`."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path

import torch

from meshloom.graph.capture import capture
from meshloom.planner.measure import measure_memory
from meshloom.planner.memory import Memory, predict_memory
from tests.memory_jobs import CASES, SETTINGS, case_of

FILE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- begin: python -m tests.memory_table -->\n", "<!-- end -->\n"
HEADER = "| model | optimizer | precision | peak predicted | measured | error | phase | kept predicted | measured |\n|---|---|---|---:|---:|---:|---|---:|---:|\n"


def predicted_and_measured(name: str, optimizer: str, precision: str, *, microbatches: int = 1) -> tuple[Memory, Memory]:
    """Of one step of a case."""
    case = case_of(name, precision)
    job = case.job(optimizer)
    generator = torch.Generator().manual_seed(0)
    batches = [case.batch(generator) for _ in range(max(microbatches, 2))]
    program = capture(job, (batches[0], batches[1]))
    return predict_memory(program, job.optimizer, microbatches=microbatches), measure_memory(job, batches[:microbatches])


def row(name: str, optimizer: str, precision: str) -> str:
    """One line of the table; bytes as KiB."""
    predicted, measured = predicted_and_measured(name, optimizer, precision)
    error = f"{predicted.peak / measured.peak - 1:+.2%}"
    columns = [
        name,
        optimizer,
        precision,
        _kib(predicted.peak),
        _kib(measured.peak),
        error,
        measured.phase,
        _kib(predicted.kept),
        _kib(measured.kept),
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

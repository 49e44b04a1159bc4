"""What a step on one device takes when the C library keeps the memory that it has freed, as meshloom tells it to, and when it gives it back.

    python benchmarks/allocator/main.py                 a table; about five minutes
    python benchmarks/allocator/main.py --json -        the same as JSON lines
    python benchmarks/allocator/main.py --jobs lstm --rounds 3

The jobs are those of benchmarks/advice. Both ways run in turns, each time in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ADVICE = Path(__file__).parents[1] / "advice"
JOBS = ("gpt", "mlp", "convolutions", "lstm", "small_llama")
AS_IT_COMES = {"MALLOC_PERTURB_": "0"}  # changes nothing, and tells meshloom to leave the allocator alone
WARM_UP_STEPS = 3
STEPS = 14


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the steps of all rounds, in seconds and in pages that the system handed out; the most memory that a process had, in bytes."""

    job: str
    kept_seconds: float
    plain_seconds: float
    kept_pages: float
    plain_pages: float
    kept_peak_bytes: int
    plain_peak_bytes: int

    @property
    def ratio(self) -> float:
        """Kept beside as it comes."""
        return self.kept_seconds / self.plain_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--run", metavar="JOB", help=argparse.SUPPRESS)  # what a measured process is started with
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(_run(arguments.run)))
        return 0
    out = sys.stderr if arguments.json == "-" else sys.stdout
    rows = [_row(name, arguments.rounds) for name in arguments.jobs.split(",")]
    print(f"{'job':13} {'kept':>9} {'as it comes':>12} {'ratio':>6} {'pages a step':>16} {'most memory, MB':>18}", file=out)
    for row in rows:
        seconds = f"{1e3 * row.kept_seconds:6.1f} ms {1e3 * row.plain_seconds:9.1f} ms {row.ratio:6.2f}"
        pages = f"{row.kept_pages:.0f} / {row.plain_pages:.0f}"
        print(f"{row.job:13} {seconds} {pages:>16} {row.kept_peak_bytes / 1e6:9.0f} / {row.plain_peak_bytes / 1e6:.0f}", file=out)
    if arguments.json:
        text = "".join(json.dumps({"event": "row", **asdict(each), "ratio": each.ratio}) + "\n" for each in rows)
        print(text, end="") if arguments.json == "-" else Path(arguments.json).write_text(text)
    return 0


def _row(name: str, rounds: int) -> Row:
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for number in range(rounds):
        for kept in (True, False) if number % 2 else (False, True):
            environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_") and key != "GLIBC_TUNABLES"}
            words = [sys.executable, __file__, "--run", name]
            done = subprocess.run(words, env=environment if kept else {**environment, **AS_IT_COMES}, check=True, capture_output=True, text=True)
            runs[kept].append(json.loads(done.stdout.splitlines()[-1]))

    def median(kept: bool, what: str) -> float:
        return statistics.median(value for run in runs[kept] for value in run[what])

    return Row(
        job=name, kept_seconds=median(True, "seconds"), plain_seconds=median(False, "seconds"), kept_pages=median(True, "pages"),
        plain_pages=median(False, "pages"), kept_peak_bytes=max(run["peak_bytes"] for run in runs[True]),
        plain_peak_bytes=max(run["peak_bytes"] for run in runs[False]),
    )  # fmt: skip


def _run(name: str) -> dict[str, Any]:
    """Of each step that counts."""
    from meshloom.report.progress import Listener
    from meshloom.trainer import Trainer

    sys.path.insert(0, str(ADVICE))
    job = importlib.import_module("jobs").JOBS[name]
    quiet = Listener(started=lambda text: None, note=lambda text: None)
    seconds: list[float] = []
    pages: list[int] = []
    with Trainer(job, devices="cpu", listener=quiet, steps=WARM_UP_STEPS + 2 * STEPS) as trainer:
        for number, batch in enumerate(trainer.batches()):
            before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            trainer.step(batch)
            if number >= WARM_UP_STEPS and batch.shares[0][0].batch == job.batch_size:  # the last batch of an epoch may be short
                seconds.append(time.perf_counter() - started)
                pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            if len(seconds) == STEPS:
                break
    return {"seconds": seconds, "pages": pages, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


if __name__ == "__main__":
    raise SystemExit(main())

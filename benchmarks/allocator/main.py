"""What a step on one device takes when the C library keeps the memory that it has freed, as meshloom tells it
to, and when it gives it back.

    python benchmarks/allocator/main.py                 a table; about five minutes
    python benchmarks/allocator/main.py --json -        the same as JSON lines
    python benchmarks/allocator/main.py --jobs lstm --rounds 3

The jobs are those of benchmarks/advice. Both ways run in turns, each time in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANK = Path(__file__).parents[1] / "advice" / "rank.py"
JOBS = ("gpt", "mlp", "convolutions", "lstm", "small_llama")
AS_IT_COMES = {"MALLOC_PERTURB_": "0"}  # changes nothing, and tells meshloom to leave the allocator alone
STEPS = 14


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the steps of all rounds, in seconds and in pages that the system handed out; the most
    memory that a process had, in bytes."""

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    out = sys.stderr if arguments.json == "-" else sys.stdout
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            _row(name, arguments.rounds, Path(directory) / "measured.json")
            for name in arguments.jobs.split(",")
        ]
    print(
        f"{'job':13} {'kept':>9} {'as it comes':>12} {'ratio':>6} {'pages a step':>16} {'most memory, MB':>18}",
        file=out,
    )
    for row in rows:
        seconds = f"{1e3 * row.kept_seconds:6.1f} ms {1e3 * row.plain_seconds:9.1f} ms {row.ratio:6.2f}"
        pages = f"{row.kept_pages:.0f} / {row.plain_pages:.0f}"
        print(
            f"{row.job:13} {seconds} {pages:>16} {row.kept_peak_bytes / 1e6:9.0f} / {row.plain_peak_bytes / 1e6:.0f}",
            file=out,
        )
    if arguments.json:
        text = "".join(
            json.dumps({"event": "row", **asdict(each), "ratio": each.ratio}) + "\n" for each in rows
        )
        print(text, end="") if arguments.json == "-" else Path(arguments.json).write_text(text)
    return 0


def _row(name: str, rounds: int, path: Path) -> Row:
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for number in range(rounds):
        for kept in (True, False) if number % 2 else (False, True):
            environment = {
                key: value
                for key, value in os.environ.items()
                if not key.startswith("MALLOC_") and key != "GLIBC_TUNABLES"
            }
            subprocess.run(
                [sys.executable, str(RANK), name, str(STEPS), str(path)],
                env=environment if kept else {**environment, **AS_IT_COMES},
                check=True,
            )
            runs[kept].append(json.loads(path.read_text()))

    def median(kept: bool, what: str) -> float:
        return statistics.median(value for run in runs[kept] for value in run[what])

    return Row(
        job=name, kept_seconds=median(True, "step_seconds"), plain_seconds=median(False, "step_seconds"), kept_pages=median(True, "pages"),
        plain_pages=median(False, "pages"), kept_peak_bytes=max(run["peak_bytes"] for run in runs[True]),
        plain_peak_bytes=max(run["peak_bytes"] for run in runs[False]),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

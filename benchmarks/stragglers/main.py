"""Wall time until the digits are read, of four workers of which one is three times slower: who waits, who
waits a little, who does not, and who divides the work.

    python benchmarks/stragglers/main.py --json -

Runs `meshloom train` on CPU processes under each plan, one after another in every round, and notes when an
evaluation reaches each accuracy first. The clock starts with the first step, when all processes are there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PLANS = {
    "synchronous": ("waiting", "dp=4"),
    "shares measured": ("waiting", "dp=4,shares=measured"),
    "bounded": ("pushing", "dp=4,exchange=async,staleness=4,rate_by_age=true"),
    "asynchronous": ("pushing", "dp=4,exchange=async,rate_by_age=true"),
}
TARGETS = (0.9, 0.95, 0.97)
MOST_SECONDS = 120.0  # of a run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    arguments = parser.parse_args()
    runs: dict[str, list[dict[float, float]]] = {kind: [] for kind in PLANS}
    for number in range(arguments.rounds):
        for kind in list(PLANS)[:: -1 if number % 2 else 1]:
            runs[kind].append(train(*PLANS[kind]))
            print(f"round {number}: {kind}: {runs[kind][-1]}", file=sys.stderr)
    records = [record(kind, target, runs) for target in TARGETS for kind in PLANS]
    if arguments.json:
        lines = "".join(json.dumps(each) + "\n" for each in records)
        sys.stdout.write(lines) if arguments.json == "-" else Path(arguments.json).write_text(lines)
    return 0


def train(job: str, plan: str) -> dict[float, float]:
    """One run, ended at the last target: accuracy -> seconds until it was reached."""
    reached: dict[float, float] = {}
    target = f"{Path(__file__).with_name('job.py')}:{job}"
    with tempfile.TemporaryDirectory() as directory, Path(directory, "text").open("w") as text:
        records = Path(directory, "records")
        records.touch()
        words = [
            sys.executable,
            "-m",
            "meshloom",
            "train",
            target,
            "--plan",
            plan,
            "--devices",
            "cpu",
            "--json",
            str(records),
        ]
        process = subprocess.Popen(
            words, stdout=text, stderr=text, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        began: float | None = None
        try:
            with records.open() as lines:
                while len(reached) < len(TARGETS) and (
                    began is None or time.monotonic() < began + MOST_SECONDS
                ):
                    line = lines.readline()
                    if not line.endswith("\n"):
                        if process.poll() is not None:
                            break
                        lines.seek(lines.tell() - len(line))
                        time.sleep(0.005)
                        continue
                    event = json.loads(line)
                    if event["event"] == "step" and began is None:
                        began = time.monotonic()
                    if event["event"] == "evaluation" and began is not None:
                        accuracy = event["metrics"]["accuracy"]
                        reached |= {
                            each: time.monotonic() - began
                            for each in TARGETS
                            if each not in reached and accuracy >= each
                        }
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        if began is None:
            sys.exit(f"{plan} did not start:\n{Path(directory, 'text').read_text()}")
    return reached


def record(kind: str, target: float, runs: dict[str, list[dict[float, float]]]) -> dict[str, Any]:
    """Median seconds over the rounds, and the ratio to `synchronous` of the same round; None where a round
    did not get there."""
    mine, waited = ([each.get(target) for each in runs[name]] for name in (kind, "synchronous"))
    there = all(each is not None for each in (*mine, *waited))
    ratios = [a / b for a, b in zip(mine, waited, strict=True)] if there else []
    return {
        "plan": PLANS[kind][1],
        "kind": kind,
        "accuracy": target,
        "seconds": round(statistics.median(mine), 2) if there else None,
        "to_synchronous": round(statistics.median(ratios), 3) if ratios else None,
        "least": round(min(ratios), 3) if ratios else None,
        "most": round(max(ratios), 3) if ratios else None,
    }


if __name__ == "__main__":
    raise SystemExit(main())

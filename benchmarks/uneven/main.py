"""Steps per second of four workers of which one is three times slower: even shares, measured ones, and those that fit, given by hand.

    python benchmarks/uneven/main.py --json -

Every run is a `meshloom train` of `job.py` on four processes; the kinds take turns, so that they see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLANS = {"even": "dp=4", "measured": "dp=4,shares=measured", "by hand": "dp=4,shares=3+3+3+1"}
BATCH = 64
SETTLED = 40  # steps after which measured shares have been found, and after which `moving` changes nothing for 20 more


def train(name: str, plan: str) -> dict[str, Any]:
    """One run. seconds: when each step had been done, from the first step's start on. record: the shares that were measured."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "records.json")
        command = [sys.executable, "-m", "meshloom", "train", f"{HERE / 'job.py'}:{name}", "--plan", plan, "--devices", "cpu", "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        records = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    shares = next((record["record"] for record in records if record["event"] == "shares"), [])
    return {"seconds": [0.0, *(BATCH * each["step"] / each["samples_per_second"] for each in steps)], "shares": shares}


def rate(run: dict[str, Any], start: int, stop: int) -> float:
    """Steps per second between two steps."""
    return (stop - start) / (run["seconds"][stop] - run["seconds"][start])


def report(name: str, plans: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds, each kind beside `even` of its own round."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in plans}
    for number in range(rounds):
        for kind in list(plans)[:: -1 if number % 2 else 1]:
            runs[kind].append(train(name, plans[kind]))
    last = len(runs["even"][0]["seconds"]) - 1
    spans = {"whole run": (0, last), "settled": (SETTLED, 60 if name == "moving" else last), "settled again": (60 + SETTLED, last)}
    found: list[dict[str, Any]] = []
    for kind, of_kind in runs.items():
        for span, (start, stop) in list(spans.items())[: 3 if name == "moving" else 2]:
            rates = [rate(each, start, stop) for each in of_kind]
            ratios = [mine / rate(even, start, stop) for mine, even in zip(rates, runs["even"], strict=True)]
            found.append(
                {
                    "job": name, "shares": kind, "steps": span, "steps_per_second": round(statistics.median(rates), 2),
                    "to_even": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
                    "records": [each["shares"] for each in of_kind] if kind == "measured" and span == "whole run" else None,
                }
            )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--job", choices=["job", "moving"], default="job", help="job: one worker stays slow; moving: first one, then another")
    parser.add_argument("--json", metavar="FILE", help="write one record per line to FILE; - is standard output")
    arguments = parser.parse_args()
    plans = PLANS if arguments.job == "job" else {kind: PLANS[kind] for kind in ("even", "measured")}
    records = report(arguments.job, plans, arguments.rounds)
    if arguments.json:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        sys.stdout.write(lines) if arguments.json == "-" else Path(arguments.json).write_text(lines)
    if arguments.json != "-":
        print("| shares | steps | steps per second | to even, in the same round |\n|---|---|---|---|")
        for each in records:
            print(f"| {each['shares']} | {each['steps']} | {each['steps_per_second']} | {each['to_even']} ({each['least']} to {each['most']}) |")


if __name__ == "__main__":
    main()

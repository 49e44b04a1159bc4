"""Steps per second of four workers of which one is three times slower: even shares, measured ones, and those
that fit, given by hand.

    python benchmarks/uneven/main.py --json -
    python benchmarks/uneven/main.py --job moving --json -

Starts four ranks under torchrun, which train `job.py` in all kinds, one after another in every round, so that
the kinds see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import job as jobs
import torch

from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer

sys.path.append(str(Path(__file__).parents[1]))
from launched import launched
from records import write_records

PLANS = {"even": "dp=4", "measured": "dp=4,shares=measured", "by hand": "dp=4,shares=3+3+3+1"}
KINDS = {"job": ("even", "measured", "by hand"), "moving": ("even", "measured")}
# Steps from ... to ..., counted from 0: all, and those by which measured shares have had time to be found.
SPANS = {
    "job": {"all": (0, 120), "settled": (40, 120)},
    "moving": {"all": (0, 120), "settled": (40, 60), "settled again": (100, 120)},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--job",
        choices=list(KINDS),
        default="job",
        help="job: one worker stays slow; moving: first one, then another",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    report(arguments, launched(__file__, 4, ["--rounds", str(arguments.rounds), "--job", arguments.job]))
    return 0


def run_rank(arguments: argparse.Namespace) -> None:
    """On each of the ranks: all kinds in every round; rank 0 writes a line per run."""
    torch.set_num_threads(1)
    with Path(arguments.json if os.environ["RANK"] == "0" else os.devnull).open("w") as file:
        for number in range(arguments.rounds):
            for kind in KINDS[arguments.job][:: -1 if number % 2 else 1]:
                print(
                    json.dumps({"shares": kind, **train(arguments.job, PLANS[kind])}), file=file, flush=True
                )


def train(name: str, plan: str) -> dict[str, Any]:
    """One run. done: when each step had been done, in seconds; the first is the start. record: shares that
    were measured."""
    with Trainer(getattr(jobs, name)(), plan, devices="cpu", share=True, listener=QUIET) as trainer:
        done = [time.monotonic()]
        for batch in trainer.batches():
            trainer.step(batch)
            done.append(time.monotonic())
        return {"done": done, "record": trainer.shares.record}


def report(arguments: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Medians over rounds, each kind beside `even` of its own round."""
    runs = {kind: [run for run in rounds if run["shares"] == kind] for kind in KINDS[arguments.job]}
    records: list[dict[str, Any]] = []
    for span, (start, stop) in SPANS[arguments.job].items():
        rates = {
            kind: [(stop - start) / (run["done"][stop] - run["done"][start]) for run in of_kind]
            for kind, of_kind in runs.items()
        }
        for kind, of_kind in rates.items():
            ratios = [mine / even for mine, even in zip(of_kind, rates["even"], strict=True)]
            record = {
                "job": arguments.job,
                "shares": kind,
                "steps": span,
                "steps_per_second": round(statistics.median(of_kind), 2),
            }
            records.append(
                {
                    **record,
                    "to_even": round(statistics.median(ratios), 3),
                    "least": round(min(ratios), 3),
                    "most": round(max(ratios), 3),
                }
            )
    records.append(
        {"job": arguments.job, "shares": "measured", "records": [run["record"] for run in runs["measured"]]}
    )
    write_records(records, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())

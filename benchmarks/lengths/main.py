"""Seconds per token of a job that pads each batch to its longest sample, beside the same job padded to 512
tokens, under dp, tp and pp.

    python benchmarks/lengths/main.py --json -

Starts two ranks under torchrun, which train both jobs under all plans, one after another in every round, so
that they see the same machine; the order is reversed from round to round. One process alone trains both in a
plain loop beside them: what padding less is worth without any plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from job import make_job

from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer

sys.path.append(str(Path(__file__).parents[1]))
from launched import launched
from records import write_records

RANKS = 2
PLANS = ("alone", "dp=2", "tp=2", "pp=2,microbatches=2")
FIRST = 3  # steps that are not counted: among them are the readings
FULL = 3  # steps counted of the job that is padded to 512, which are all alike


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=16, help="steps counted of the job that is padded to its longest"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    records = records_of(
        launched(__file__, RANKS, ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)])
    )
    write_records(records, arguments.json)
    for record in records:
        per_token = record["microseconds_per_token"]
        print(
            f"{record['plan']:<20} to the longest {per_token['longest']:7.1f} us per token, to 512 {per_token['full']:7.1f}:"
            f" {record['ratio']:.3f} ({record['least']:.3f} to {record['most']:.3f})   readings: {record['readings'] or '-'}",
            file=sys.stderr,
        )
    return 0


def run_rank(arguments: argparse.Namespace) -> None:
    """On each of the ranks: all plans in every round; rank 0 writes a line per run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Path(arguments.json if os.environ["RANK"] == "0" else os.devnull).open("w") as file:
        for number in range(arguments.rounds):
            for plan in PLANS[:: -1 if number % 2 else 1]:
                for to_longest in (True, False)[:: -1 if number % 2 else 1]:
                    steps = FIRST + (arguments.steps if to_longest else FULL)
                    found = (
                        train_alone(steps, to_longest=to_longest)
                        if plan == "alone"
                        else train(plan, steps, to_longest=to_longest)
                    )
                    print(
                        json.dumps({"plan": plan, "job": "longest" if to_longest else "full", **found}),
                        file=file,
                        flush=True,
                    )
    dist.destroy_process_group()


def train(plan: str, steps: int, *, to_longest: bool) -> dict[str, Any]:
    """Seconds and tokens of the steps that count, padding among them; what was said of readings."""
    notes: list[str] = []
    listener = Listener(started=lambda text: None, note=notes.append)
    seconds, tokens = [0.0] * steps, [0] * steps
    with Trainer(
        make_job(steps, to_longest=to_longest),
        plan,
        devices="cpu",
        share=True,
        listener=listener,
        cache="off",
    ) as trainer:
        for step, batch in enumerate(trainer.batches()):
            dist.barrier()
            started = time.perf_counter()
            trainer.step(batch)
            seconds[step] = time.perf_counter() - started
            tokens[step] = tokens_of(steps, step, to_longest=to_longest)
    readings = next((note for note in notes if note.startswith("The loss was captured")), None)
    return {"seconds": sum(seconds[FIRST:]), "tokens": sum(tokens[FIRST:]), "readings": readings}


def train_alone(steps: int, *, to_longest: bool) -> dict[str, Any]:
    """The same on rank 0 in a plain loop of one thread, while the other waits."""
    taken, tokens = 0.0, 0
    if dist.get_rank() == 0:
        job = make_job(steps, to_longest=to_longest)
        model, data = job.model(), job.data()
        optimizer = job.optimizer(list(model.named_parameters()))
        for step in range(steps):
            batch = job.collate([data[step * job.batch_size + row] for row in range(job.batch_size)])
            started = time.perf_counter()
            optimizer.zero_grad()
            total, count = job.loss(model, batch)
            (total / count).backward()
            optimizer.step()
            if step >= FIRST:
                taken += time.perf_counter() - started
                tokens += batch[0].numel()
    dist.barrier()
    return {"seconds": taken, "tokens": tokens, "readings": None}


def tokens_of(steps: int, step: int, *, to_longest: bool) -> int:
    """Of a global batch, padding among them."""
    job = make_job(steps, to_longest=to_longest)
    data = job.data()
    return job.collate(
        [data[each] for each in islice(range(step * job.batch_size, len(data)), job.batch_size)]
    )[0].numel()


def records_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds, and the ratio of a token's seconds in either job of the same round."""
    records: list[dict[str, Any]] = []
    for plan in PLANS:
        longest, full = (
            [run["seconds"] / run["tokens"] for run in runs if (run["plan"], run["job"]) == (plan, job)]
            for job in ("longest", "full")
        )
        ratios = [mine / theirs for mine, theirs in zip(longest, full, strict=True)]
        readings = next(
            (run["readings"] for run in runs if run["plan"] == plan and run["job"] == "longest"), None
        )
        per_token = {"longest": 1e6 * statistics.median(longest), "full": 1e6 * statistics.median(full)}
        ratio = per_token["longest"] / per_token["full"]
        record = {
            "plan": plan,
            "microseconds_per_token": per_token,
            "ratio": ratio,
            "least": min(ratios),
            "most": max(ratios),
        }
        records.append({**record, "readings": readings})
    return records


if __name__ == "__main__":
    sys.exit(main())

"""One rank of a measured run: it trains some steps under the plan that it was started with, and rank 0 writes
what they took and sent, as a line of JSON.

python rank.py gpt 12 FILE                    job, steps that count, where to
python rank.py gpt 0 FILE --turns FOLDER      as many as each line says that comes through the pipe FOLDER/<rank>, until that is closed
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import JOBS

from meshloom.telemetry.progress import QUIET
from meshloom.train.contract import Batch
from meshloom.train.trainer import Trainer

WARM_UP_STEPS = 3


def sent(trainer: Trainer) -> dict[str, int]:
    """Axis -> bytes that this rank has handed over so far."""
    context = trainer.replicas[0].context
    found = {
        axis: sum(count.bytes for count in group.counts.values()) for axis, group in context.groups.items()
    }
    found["dp"] += sum(count.bytes for count in context.statistics.counts.values())
    return found


def turn(trainer: Trainer, batches: Iterator[Batch], steps: int, first: int) -> dict[str, Any]:
    """What `steps` steps take after `first` that do not count. pages: that the system has handed out."""
    for _ in range(first):
        trainer.step(next(batches))
    seconds: list[float] = []
    pages: list[int] = []
    num_bytes: list[dict[str, int]] = []
    while len(seconds) < steps:
        batch = next(batches)
        before, faults, started = (
            sent(trainer),
            resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
            time.perf_counter(),
        )
        trainer.step(batch)
        took, usage, after = (
            time.perf_counter() - started,
            resource.getrusage(resource.RUSAGE_SELF),
            sent(trainer),
        )
        if batch.shares[0][0].batch == trainer.job.batch_size:  # the last batch of an epoch may be short
            seconds.append(took)
            pages.append(usage.ru_minflt - faults)
            num_bytes.append(
                {axis: after[axis] - before[axis] for axis in after if after[axis] > before[axis]}
            )
    found = {axis: statistics.median(each.get(axis, 0) for each in num_bytes) for axis in num_bytes[0]}
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"step_seconds": seconds, "bytes": found, "pages": pages, "peak_bytes": peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("steps", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    with Trainer(JOBS[arguments.job], devices="cpu", share=True, listener=QUIET, steps=100_000) as trainer:
        batches = iter(trainer.batches())

        def take(steps: int, first: int) -> None:
            found = turn(trainer, batches, steps, first)
            if trainer.world.main:
                arguments.file.write_text(json.dumps(found) + "\n")

        if arguments.turns is None:
            take(arguments.steps, WARM_UP_STEPS)
            return
        for _ in range(WARM_UP_STEPS):
            trainer.step(next(batches))
        with (arguments.turns / str(trainer.world.local[0].rank)).open() as orders:
            while order := orders.readline():
                take(int(order), 1)  # what lay in the caches is gone since the last turn


if __name__ == "__main__":
    main()

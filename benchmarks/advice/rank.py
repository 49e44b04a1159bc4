"""One rank of a measured run: it trains a few steps under the plan that it was started with, and rank 0 writes what they took and sent.

python rank.py gpt 12 FILE.json          job, steps that count, where to
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path

from jobs import JOBS

from meshloom.report.progress import QUIET
from meshloom.trainer import Trainer

WARM_UP_STEPS = 3


def sent(trainer: Trainer) -> dict[str, int]:
    """Axis -> bytes that this rank has handed over so far."""
    seat = trainer.replicas[0].seat
    found = {axis: sum(count.bytes for count in group.counts.values()) for axis, group in seat.groups.items()}
    found["dp"] += sum(count.bytes for count in seat.statistics.counts.values())
    return found


def main() -> None:
    name, steps, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    seconds: list[float] = []
    pages: list[int] = []  # that the system has handed out
    num_bytes: list[dict[str, int]] = []
    with Trainer(JOBS[name], devices="cpu", share=True, listener=QUIET, steps=10_000) as trainer:
        for number, batch in enumerate(trainer.batches()):
            before, faults, started = sent(trainer), resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            trainer.step(batch)
            took, usage, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF), sent(trainer)
            if number >= WARM_UP_STEPS and batch.shares[0][0].batch == trainer.job.batch_size:  # the last batch of an epoch may be short
                seconds.append(took)
                pages.append(usage.ru_minflt - faults)
                num_bytes.append({axis: after[axis] - before[axis] for axis in after if after[axis] > before[axis]})
            if len(seconds) == steps:
                break
        if trainer.world.main:
            found = {axis: statistics.median(each.get(axis, 0) for each in num_bytes) for axis in num_bytes[0]}
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            path.write_text(json.dumps({"step_seconds": seconds, "bytes": found, "pages": pages, "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main()

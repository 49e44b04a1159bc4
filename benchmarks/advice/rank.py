"""One rank of a measured run: it trains a few steps under the plan that it was started with, and rank 0 writes what they took and sent.

python rank.py gpt 12 FILE.json          job, steps that count, where to
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from jobs import JOBS

from meshloom.report.progress import Listener
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
    quiet = Listener(started=lambda text: None, note=lambda text: None)
    seconds: list[float] = []
    before: dict[str, int] = {}
    with Trainer(JOBS[name], devices="cpu", share=True, listener=quiet, steps=10_000) as trainer:
        for number, batch in enumerate(trainer.batches()):
            if number == WARM_UP_STEPS:
                before = sent(trainer)
            started = time.perf_counter()
            trainer.step(batch)
            seconds.append(time.perf_counter() - started)
            if number + 1 == WARM_UP_STEPS + steps:
                break
        after = sent(trainer)
        if trainer.world.main:
            num_bytes = {axis: (after[axis] - before[axis]) / steps for axis in after if after[axis] > before[axis]}
            path.write_text(json.dumps({"step_seconds": statistics.median(seconds[WARM_UP_STEPS:]), "bytes": num_bytes}))


if __name__ == "__main__":
    main()

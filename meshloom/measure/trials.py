"""Trains a few steps under plans on this machine's CPU, in turns, and measures their steps.

    try_plans          starts the ranks of a plan, as `meshloom train` does: the same job file, threads and transport
    try_here           in each rank: warm-up steps, then measured steps; rank 0 writes their seconds

Only training runs: no evaluation, no checkpoint. The trained parameters are discarded.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from meshloom.core.job import Job
from meshloom.launch.processes.launcher import run_ranks
from meshloom.planner.pricing import Option
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer

ROUNDS = 2  # there and back, as machines are faster and slower from minute to minute
WARM_UP_STEPS = 3
SECONDS = 2.0  # that the steps which count take in a round, by their price
STEPS = (6, 40)  # that count, least and most
MOST_STEPS = 1200  # taken at all, where full batches are rare
STOPPED = (129, 130, 143)  # exit codes of runs that a signal has ended


def try_plans(
    options: Sequence[Option],
    target: str,
    transport: str,
    tell: Callable[[str], None],
    words: Sequence[str] = (),
) -> dict[str, float | None] | int:
    """Plan -> seconds of a step, the median; None if it failed, after its ranks have printed why. The exit
    code if a signal has ended them.

    target: the job's FILE.py:NAME. words: its sys.argv after its name. tell: receives a line for each plan
    that is tried.
    """
    took: dict[str, list[float]] = {str(option.plan): [] for option in options}
    failed: set[str] = set()
    turns = [option for number in range(ROUNDS) for option in options[:: -1 if number % 2 else 1]]
    with tempfile.TemporaryDirectory(prefix="meshloom-") as directory:
        path = Path(directory) / "trial.json"
        for number, option in enumerate(turns):
            plan = option.plan
            if str(plan) in failed:
                continue
            tell(f"trial {number + 1} of {len(turns)}: {plan}")
            steps = min(max(STEPS[0], round(SECONDS / option.price.seconds)), STEPS[1])
            request = ["plan", target, "--plan", str(plan), "--transport", transport]
            request += ["--trial", str(path), "--trial-steps", str(steps)]
            command = [sys.executable, "-m", "meshloom", *request, "--", *words]
            code = run_ranks(command, plan.mesh, "cpu", str(plan), transport=transport)
            if code in STOPPED:
                return code
            if code:
                failed.add(str(plan))
            else:
                took[str(plan)] += json.loads(path.read_text())
    return {plan: None if plan in failed else statistics.median(seconds) for plan, seconds in took.items()}


def try_here(job: Job, transport: str, steps: int, path: Path) -> None:
    """Runs in a rank that `try_plans` has started. Rank 0 writes the seconds of each of `steps` steps to
    `path`.

    Short batches at the end of an epoch do not count, if there are others.
    """
    took: dict[int, list[float]] = {}  # by samples of the global batch
    with Trainer(
        replace(job, evaluate=None), devices="cpu", transport=transport, share=True, listener=QUIET, steps=MOST_STEPS
    ) as trainer:  # fmt: skip
        for number, batch in enumerate(trainer.batches()):
            started = time.perf_counter()
            trainer.step(batch)
            if number >= WARM_UP_STEPS:
                took.setdefault(batch.shares[0][0].batch, []).append(time.perf_counter() - started)
            if took and len(took[max(took)]) == steps:
                break
        if trainer.world.main:
            path.write_text(json.dumps(took[max(took)]))

"""Timelines that a pipeline's ranks record with events of the GPU, beside the step on the host's clock."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rows import MAIN, Row, job_of, simulated, tried

import meshloom as ml
from meshloom.telemetry.progress import QUIET
from meshloom.telemetry.timeline_files import read_recording

STEPS = 3  # a run records its first three


def timeline(device: str) -> Iterator[Row]:
    """Each action of the schedule has its events, in its order (`Timeline` checks that as it is read), and their time is part of
    the step's. Ranks share the GPU's stream and take turns there, so that no two actions overlap."""
    for plan in ("pp=2,microbatches=4,schedule=1f1b", "pp=2,microbatches=4,schedule=zb-h1"):
        yield from tried(f"a step under {plan}", lambda plan=plan: _recorded(plan, device))


def _recorded(plan: str, device: str) -> tuple[bool, str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as out:
        took: list[float] = []
        with ml.Trainer(
            job_of(MAIN), plan, devices=simulated(device), steps=STEPS, out=out, listener=QUIET, cache="off"
        ) as trainer:
            for batch in trainer.batches():
                began = time.perf_counter()
                trainer.step(batch)
                if device == "cuda":
                    torch.cuda.synchronize()
                took.append(time.perf_counter() - began)
        last = read_recording(Path(out)).timeline(STEPS)
    actions = sorted((each for row in last.rows for each in row.actions), key=lambda each: each.start)
    busy = sum(each.seconds for each in actions)
    shortest = min(each.seconds for each in actions)
    # events count in steps of half a microsecond, and clocks of two ranks may be apart
    slack = 1e-5 + last.clock_error_seconds
    overlap = max((before.stop - after.start for before, after in pairwise(actions)), default=0.0)
    right = shortest > 0 and last.seconds <= took[-1] + slack and overlap <= slack
    text = (
        f"{len(actions)} actions in {1e3 * last.seconds:.2f} ms, busy {busy / last.seconds:.0%} of it, of a step of {1e3 * took[-1]:.2f} ms; "
        f"the shortest {1e6 * shortest:.0f} us; two overlap by {1e6 * max(overlap, 0.0):.1f} us at most"
    )
    return right, text, {"seconds": last.seconds, "step_seconds": took[-1], "busy": busy, "overlap": overlap}

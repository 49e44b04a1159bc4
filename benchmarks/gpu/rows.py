"""What parts share: rows, one for each fact, and runs of the main job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import meshloom as ml
from meshloom.core.jobfile import load_job
from meshloom.telemetry.progress import QUIET

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples/01_gpt_bytes.py"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fact. status: passed, failed, or refused (meshloom says in a sentence that it does not do this, on
    any device). figures: by name, in JSON."""

    name: str
    status: str
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def tried(name: str, find: Callable[[], tuple[bool, str, dict[str, Any]]]) -> Iterator[Row]:
    """A row whose failure leaves the others."""
    try:
        right, text, figures = find()
    except Exception as problem:
        yield Row(name=name, status="failed", text=f"{type(problem).__name__}: {problem}"[:1000])
        return
    yield Row(name=name, status=status_of(right), text=text, figures=figures)


def job_of(path: Path) -> ml.Job:
    """Without evaluation, which takes longer than the steps; the main job's batches are small, because a CPU
    computes them too."""
    job = load_job(str(path))
    assert job is not None
    return replace(job, evaluate=None, batch_size=8 if path == MAIN else job.batch_size)


def trained(
    job: ml.Job, plan: str, device: str, *, steps: int, dtype: torch.dtype | None, **settings: Any
) -> list[float]:
    """The losses."""
    with ml.Trainer(
        job, plan, devices=device, steps=steps, dtype=dtype, listener=QUIET, **settings, cache="off"
    ) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
        if "out" in settings:
            trainer.save()
        return found


def simulated(device: str) -> str:
    return "simulated:cuda" if device == "cuda" else "simulated"


def status_of(is_right: bool) -> str:
    return "passed" if is_right else "failed"

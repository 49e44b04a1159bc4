"""Whether a loss is a mean over the batch, a sum, or neither: its value of a batch against those of the batch's halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from meshloom.adopt.watching.draws import set_draws
from meshloom.adopt.watching.watch import Watched
from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job
from meshloom.core.modules.built import built
from meshloom.core.moments.current_step import at_step
from meshloom.core.random import preserved_draws


def kind_of_loss(target: Path, words: tuple[str, ...], watched: Watched) -> str:
    """ "mean", "sum", "neither", "undivided": it cannot be computed of halves; or "unknown": it draws, or fails."""
    with preserved_draws():
        try:
            with as_program(str(target), words):
                job = load_job(str(target))
            assert job is not None
            return _kind(job, watched)
        except Exception:  # the comparison of whole steps says what is wrong
            return "unknown"


def _kind(job: Job, watched: Watched) -> str:
    first = watched.steps[0][0]
    samples: list[Any] = first.samples if first.samples is not None else list(zip(*first.batch, strict=True))
    if len(samples) < 2:
        return "unknown"
    model = built(job.model)
    model.load_state_dict(watched.before)
    model.eval()
    half = len(samples) // 2

    def value(part: list[Any], later: bool = False) -> float:
        set_draws(watched.steps[-1][-1].draws if later else first.draws)
        with torch.no_grad(), at_step(0):
            loss: Any = job.loss(model, (job.collate or default_collate)(part))
            return float(loss)

    whole, again = value(samples), value(samples, later=True)
    try:
        parts = value(samples[:half]), value(samples[half:])
    except Exception:  # it has the size of the batch in it
        return "undivided"
    mean = (half * parts[0] + (len(samples) - half) * parts[1]) / len(samples)
    ratio = whole / mean if mean else 1.0
    if 1.6 < ratio < 2.4:
        return "sum"
    if abs(ratio - 1) < 1e-3:
        return "mean"
    return "neither" if whole == again else "unknown"

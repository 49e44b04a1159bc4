"""Loss against wall time of the digits example under several exchanges, with even ranks and with one that is three times slower, by sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from network import Host
from ranks import on_hosts
from torch import Tensor, nn

import meshloom as ml
from meshloom.jobfile import load_job
from meshloom.report.progress import Listener, Progress

RANKS = 4
PLANS = (f"dp={RANKS}", f"dp={RANKS},exchange=server", f"dp={RANKS},exchange=local_sgd,local_steps=8")
SECONDS_PER_SAMPLE = 0.002  # slept in the loss: 32 ms for a rank's share, beside some 5 ms that it computes
SLOWER = 3.0
STEPS = 230
EXAMPLE = Path(__file__).parents[2] / "examples" / "02_digits.py"


def loss_curves(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """A record per plan and kind of ranks: seconds and loss of every step, the accuracy at the end."""
    return [
        {"part": "curves", "plan": plan, "slower": slower, **on_hosts(hosts, range(RANKS), _train, plan, slower)[0]}
        for slower in (1.0, SLOWER)
        for plan in PLANS
    ]


def _train(plan: str, slower: float) -> dict[str, Any]:
    """slower: how many times the last rank's samples take as long as the others'."""
    seconds: list[float] = []
    losses: list[float] = []

    def told(progress: Progress) -> None:
        seconds.append(time.monotonic() - began)
        losses.append(progress.loss)

    listener = Listener(started=lambda text: None, note=lambda text: None, step=told)
    last = int(os.environ["RANK"]) == RANKS - 1
    with ml.Trainer(_job(SECONDS_PER_SAMPLE * (slower if last else 1.0)), plan, devices="cpu", transport="gloo", listener=listener) as trainer:
        began = time.monotonic()
        summary = trainer.fit()
    return {"seconds": seconds, "losses": losses, "accuracy": summary.evaluation["accuracy"]}


def _job(seconds_per_sample: float) -> ml.Job:
    """The example's, evaluated at its end, whose loss sleeps where it trains."""
    job = load_job(str(EXAMPLE))
    assert job and job.evaluate

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(seconds_per_sample * len(batch["digit"]))
        return job.loss(model, batch)

    return replace(job, loss=loss, steps=STEPS, evaluate=replace(job.evaluate, every=STEPS))

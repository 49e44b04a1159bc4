"""Seconds of a step where gradients travel while backward goes on, and where they travel after it; and the
share of communication that is hidden."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from jobs import sleeping_job
from network import Host
from steps import run_on_hosts

import meshloom as ml

WIDTH, HIDDEN = 512, 1024  # 8.4 million parameters: 34 MB of gradients
BUCKET_BYTES = 4 << 20
COMPUTE_SECONDS = 1.5  # of a rank's share of the batch: about as long as its gradients travel
SAMPLES = 4  # of each rank


def time_overlap(hosts: Sequence[Host], num_hosts: int, rounds: int, steps: int) -> dict[str, Any]:
    """One record: medians of seconds per step over `rounds` runs of `steps` steps of each kind, in turns.

    compute: of one rank alone with its share of the batch. hidden: the part of what communication adds to
        that which overlap takes off again.
    """
    plans = {
        f"{name}": f"dp={num_hosts},bucket_bytes={BUCKET_BYTES},overlap={name}" for name in ("true", "false")
    }
    found: dict[str, list[float]] = {"alone": [], **{name: [] for name in plans}}
    for _ in range(rounds):
        found["alone"] += run_on_hosts(hosts, _job(1, steps), "dp=1")["seconds"]
        for name, plan in plans.items():
            found[name] += run_on_hosts(hosts, _job(num_hosts, steps), plan)["seconds"]
    alone, overlapped, after = (statistics.median(found[name]) for name in ("alone", "true", "false"))
    return {
        "part": "overlap",
        "hosts": num_hosts,
        "compute": alone,
        "with_overlap": overlapped,
        "without_overlap": after,
        "hidden": (after - overlapped) / (after - alone),
        "seconds": found,
    }


def _job(num_ranks: int, steps: int) -> ml.Job:
    return sleeping_job(
        seconds=COMPUTE_SECONDS / SAMPLES,
        batch_size=SAMPLES * num_ranks,
        width=WIDTH,
        hidden=HIDDEN,
        steps=steps + 1,
    )

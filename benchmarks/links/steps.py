"""Training steps on ranks of their own hosts: seconds, what was handed to collectives, and what has left by
the wires."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from network import Host
from ranks import on_hosts

import meshloom as ml
from meshloom.telemetry.progress import QUIET
from meshloom.telemetry.traffic import Traffic
from meshloom.train.trainer import Trainer

WARM_UP = 1  # steps: the first reads the loss, divides it, allocates, and connects


def run_on_hosts(hosts: Sequence[Host], job: ml.Job, plan: str) -> dict[str, Any]:
    """The steps of `job` after the first under `plan`, one rank on each of the first hosts.

    seconds: by step, until the last rank is done. For all of them together, by rank: counted and predicted
    (bytes by axis and collective), held_up (seconds in collectives); and by host what has left it:
    wire_bytes, packets.
    """
    size = ml.Plan.parse(plan).mesh.size
    answers = on_hosts(hosts, range(size), _run, job, plan, hosts)
    together: dict[str, Any] = {
        name: [answer[name] for answer in answers]
        for name in ("counted", "predicted", "held_up", "wire_bytes", "packets")
    }
    return {
        "plan": plan,
        "seconds": [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)],
        **together,
    }


def _run(job: ml.Job, plan: str, hosts: Sequence[Host]) -> dict[str, Any]:
    host = hosts[int(os.environ["RANK"])]
    with Trainer(
        job, plan, devices="cpu", transport="gloo", timeout_seconds=120.0, listener=QUIET, cache="off"
    ) as trainer:
        seconds: list[float] = []
        before, wire = _spent(trainer), host.counted()
        for batch in trainer.batches():
            if batch.step == WARM_UP:
                before = _spent(trainer)
                _meet(trainer)
                wire = host.counted()
            began = time.monotonic()
            trainer.step(batch)
            seconds.append(time.monotonic() - began)
        _meet(trainer)
        wire_bytes, packets = (after - earlier for after, earlier in zip(host.counted(), wire, strict=True))
        after = _spent(trainer)
    return {
        "seconds": seconds[WARM_UP:],
        "predicted": _less(after.predicted, before.predicted),
        "counted": _less(after.counted, before.counted),
        "held_up": after.held_up - before.held_up,
        "wire_bytes": wire_bytes,
        "packets": packets,
    }


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """By a rank, since it opened its world. held_up: seconds."""

    predicted: Traffic
    counted: Traffic
    held_up: float


def _spent(trainer: Trainer) -> _Spent:
    counts = [count for group in trainer.world.local[0].groups.values() for count in group.counts.values()]
    summary = trainer.summary(0.0, {}, None)
    return _Spent(
        predicted=summary.predicted, counted=summary.counted, held_up=sum(count.seconds for count in counts)
    )


def _less(after: Traffic, before: Traffic) -> dict[str, dict[str, int]]:
    """Bytes between two moments, by axis and collective."""
    found = {
        axis: {name: count - before.bytes[axis].get(name, 0) for name, count in kinds.items()}
        for axis, kinds in after.bytes.items()
    }
    return {axis: {name: count for name, count in kinds.items() if count} for axis, kinds in found.items()}


def _meet(trainer: Trainer) -> None:
    trainer.world.local[0].world.barrier().wait()

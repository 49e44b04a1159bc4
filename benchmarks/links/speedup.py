"""How much faster n ranks are than one, next to Amdahl's bound with the measured serial share, without and
with communication.

S(n) = T(1) / (T_serial + T_parallel / n)                                       R8.1
S(n) = T(1) / (T_serial + T_parallel / n * bubble + T_communication(n))         bubble: (m + p - 1) / m along pp, else 1
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from jobs import BLOCKS, sleeping_job
from network import Host
from steps import run_on_hosts
from traffic import sent_share

import meshloom as ml

BATCH = 64
SECONDS_PER_SAMPLE, UPDATE_SECONDS = 0.04, 0.1
MICROBATCHES = 8


def time_speedup(
    hosts: Sequence[Host], sizes: Sequence[int], steps: int, bytes_per_second: float | None
) -> list[dict[str, Any]]:
    """A record per axis and number of ranks.

    bytes_per_second: of a link; None: it is not known, and communication counts as nothing. T_communication
    is what the counted bytes take there, one collective after another, nothing hidden; so no gradient travels
    during backward here. Latency is left out: it is a thousandth of that.
    """
    alone = statistics.median(run_on_hosts(hosts, _job(steps), "dp=1")["seconds"])
    parallel = BATCH * SECONDS_PER_SAMPLE  # what is slept for samples; the rest nobody divides
    records: list[dict[str, Any]] = []
    for axis in ("dp", "pp", "tp"):
        for n in sizes:
            run = run_on_hosts(hosts, _job(steps), plan_of(axis, n))
            seconds = statistics.median(run["seconds"])
            sent = (
                max(
                    sum(count * sent_share(name, n) for name, count in rank[axis].items())
                    for rank in run["counted"]
                )
                / steps
            )
            communication = sent / bytes_per_second if bytes_per_second else 0.0
            bubble = (MICROBATCHES + n - 1) / MICROBATCHES if axis == "pp" else 1.0
            records.append(
                {
                    "part": "speedup",
                    "axis": axis,
                    "ranks": n,
                    "plan": run["plan"],
                    "alone": alone,
                    "seconds": seconds,
                    "serial_share": 1 - parallel / alone,
                    "communication": communication,
                    "held_up": statistics.mean(run["held_up"]) / steps,
                    "speedup": alone / seconds,
                    "amdahl": speedup(alone, parallel, n),
                    "with_communication": speedup(alone, parallel, n, bubble, communication),
                }
            )
    return records


def plan_of(axis: str, n: int) -> str:
    """
    >>> plan_of("pp", 4)
    'pp=4,microbatches=8,cuts=blocks.2+blocks.4+blocks.6'
    """
    if axis == "pp":
        return f"pp={n},microbatches={MICROBATCHES},cuts={'+'.join(f'blocks.{BLOCKS // n * stage}' for stage in range(1, n))}"
    return f"{axis}={n},overlap=false" if axis == "dp" else f"{axis}={n}"


def _job(steps: int) -> ml.Job:
    return sleeping_job(
        seconds=SECONDS_PER_SAMPLE, batch_size=BATCH, update_seconds=UPDATE_SECONDS, steps=steps + 1
    )


def speedup(alone: float, parallel: float, n: int, bubble: float = 1.0, communication: float = 0.0) -> float:
    """S(n) as above. alone: seconds of a step on one rank, of which `parallel` can be divided.

    >>> speedup(10.0, 9.0, 9)
    5.0
    >>> speedup(10.0, 8.0, 2, communication=4.0)
    1.0
    """
    return alone / (alone - parallel + parallel / n * bubble + communication)

"""The summary of a run: losses, seconds, and bytes, as predicted by the plan's formulas and as counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.core.compiling import Compiled
from meshloom.core.losses.loss_scale import LossScale
from meshloom.telemetry.traffic import Traffic


@dataclass(frozen=True)
class TimeShares:
    """Shares of a rank's time in the steps: computing, moving data between ranks, waiting for slower ranks,
    reading data."""

    compute: float
    communication: float
    waiting: float
    data: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of a run, of this process's first rank. compiled: by torch.compile, if the plan has it done. scale: of the loss at
    the end, if the plan's precision has one."""

    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    evaluation: dict[str, float]
    predicted: Traffic
    counted: Traffic
    shares: TimeShares
    checkpoint: Path | None
    compiled: Compiled | None = None
    scale: LossScale | None = None


def time_shares(
    seconds: float,
    data: float,
    blocked: float,
    arrivals: Sequence[Sequence[float]],
    rank: int,
    num_steps: int,
) -> TimeShares:
    """Divide `seconds` of `num_steps` steps.

    data: seconds spent reading. blocked: seconds held up in collectives. arrivals: by rank, when it was ready
        to exchange in each of the newest steps, on clocks that started together.

    Waiting is how much later the slowest rank was ready, never more than the time held up; the rest of that
    time is communication.

    >>> time_shares(10.0, 0.0, 4.0, [[1.0, 2.0], [2.0, 2.0]], 0, 2)
    TimeShares(compute=0.6, communication=0.3, waiting=0.1, data=0.0)
    """
    rows = list(zip(*arrivals, strict=False))
    late = sum(max(row) - row[rank] for row in rows) * (num_steps / len(rows) if rows else 0.0)
    waiting = min(blocked, late)
    total = max(seconds, 1e-9)
    return TimeShares(
        compute=max(0.0, total - data - blocked) / total,
        communication=(blocked - waiting) / total,
        waiting=waiting / total,
        data=data / total,
    )

"""Shares in proportion to measured speed: ranks time their chunks, rank 0 decides, and all change the shares.

A rank's time per sample excludes its waits for other replicas:

    begin --- chunks ---(waits along dp: excluded)--- chunks --- end | exchange, update: excluded
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence

import torch

from meshloom.comm.objects import collect, share
from meshloom.comm.rank_context import RankContext
from meshloom.comm.recording import RecordedGroup
from meshloom.data.proportion import EVERY_STEPS, propose
from meshloom.data.shares import Shares

MIN_STEPS = 3  # of a median; with fewer, it may be that of a first step, which allocates and compiles


class Pace:
    """Seconds per sample of the newest `EVERY_STEPS` steps of one rank.

    along_dp: the groups in which it waits for other replicas while it computes.
    """

    def __init__(self, along_dp: Sequence[RecordedGroup], device: torch.device) -> None:
        self._along_dp = along_dp
        self._device = device
        self._began = 0.0
        self._seconds: deque[float] = deque(maxlen=EVERY_STEPS)  # per sample

    def begin(self) -> None:
        """Start timing a step."""
        self._began = time.monotonic() - self._blocked_seconds()

    def end(self, num_samples: int) -> None:
        """Stop timing: the rank has computed the `num_samples` of its share."""
        if self._device.type == "cuda":
            # kernels; collectives run on other streams
            torch.cuda.current_stream(self._device).synchronize()
        if num_samples:
            self._seconds.append((time.monotonic() - self._blocked_seconds() - self._began) / num_samples)

    def median(self) -> float | None:
        """Median seconds per sample; None before `MIN_STEPS` steps."""
        return max(statistics.median(self._seconds), 1e-9) if len(self._seconds) >= MIN_STEPS else None

    def forget(self) -> None:
        """Drop all measurements."""
        self._seconds.clear()

    def _blocked_seconds(self) -> float:
        return sum(count.seconds for group in self._along_dp for count in group.counts.values())


def remeasure(context: RankContext, pace: Pace, shares: Shares, batch_size: int, stop_step: int) -> str:
    """Change `shares` if a step is predicted to be faster; a message to the user, or "". All ranks call it.

    The change is from the first step that no reader has looked up. A replica is as slow as its slowest rank.
    batch_size: samples of a full batch. stop_step: the end of the run.
    """
    mine = [context.place.dp, pace.median(), shares.first_free]
    measured: list[tuple[int, float | None, int]] = collect(context.world, mine)
    first_free = max(free for _, _, free in measured)
    decision = None
    if context.rank == 0 and first_free < stop_step:
        decision = _decide(measured, shares.sizes(first_free - 1, batch_size), first_free)
    decided: tuple[list[int], str] | None = share(context.world, decision)
    if decided is None:
        return ""
    sizes, text = decided
    shares.change(first_free, sizes)
    pace.forget()
    return text


def _decide(
    measured: list[tuple[int, float | None, int]], sizes: list[int], step: int
) -> tuple[tuple[int, ...], str] | None:
    seconds = [0.0] * len(sizes)
    for replica, median, _ in measured:
        if median is None:
            return None
        seconds[replica] = max(seconds[replica], median)
    proposal = propose(sizes, seconds)
    if not proposal:
        return None
    shares = "+".join(map(str, proposal.sizes))
    return proposal.sizes, f"shares {shares} from step {step}: {proposal.reason}"

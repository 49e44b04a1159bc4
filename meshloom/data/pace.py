"""How long a replica computes per sample, without what it waits for other replicas.

begin --- chunks ---(waits along dp: left out)--- chunks --- end | exchange, update: left out
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence

import torch

from meshloom.comm.recording import RecordedGroup
from meshloom.data.proportion import EVERY_STEPS

LEAST_STEPS = 3  # a median of fewer may be that of a first step, in which much is made ready


class Pace:
    """Of the newest `EVERY_STEPS` steps of one rank. along_dp: the groups in which it waits for other
    replicas while it computes."""

    def __init__(self, along_dp: Sequence[RecordedGroup], device: torch.device) -> None:
        self._along_dp = along_dp
        self._device = device
        self._began = 0.0
        self._seconds: deque[float] = deque(maxlen=EVERY_STEPS)  # per sample

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic() - self._held_up()

    def end(self, num_samples: int) -> None:
        """The rank has nothing left to compute before the exchange; `num_samples` of its share."""
        if self._device.type == "cuda":
            # kernels; collectives have streams of their own
            torch.cuda.current_stream(self._device).synchronize()
        if num_samples:
            self._seconds.append((time.monotonic() - self._held_up() - self._began) / num_samples)

    def median(self) -> float | None:
        """Seconds per sample; None as long as too little is known."""
        return max(statistics.median(self._seconds), 1e-9) if len(self._seconds) >= LEAST_STEPS else None

    def forget(self) -> None:
        """Only what comes from now on counts."""
        self._seconds.clear()

    def _held_up(self) -> float:
        return sum(count.seconds for group in self._along_dp for count in group.counts.values())

"""Seconds of an operation on a device, and the typical one of many measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch


def now(device: torch.device) -> float:
    """Seconds, after all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def typical(values: Sequence[float]) -> tuple[float, float]:
    """The lower quartile, and how far above it the median lies, relative to it.

    What else runs on the machine only adds time, and that is not the operator's.

    >>> typical([1.0, 1.0, 2.0, 9.0])
    (1.0, 0.5)
    """
    ordered = sorted(values)
    low = ordered[(len(ordered) - 1) // 4]
    return low, statistics.median(ordered) / low - 1

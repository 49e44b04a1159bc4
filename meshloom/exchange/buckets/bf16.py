"""Gradients are sent as bfloat16: half the bytes of float32, 8 bits of mantissa, the same range.

Each rank rounds what it sends, and sums are rounded on the way. There is no error feedback: rounding errors
of single steps have no direction.
"""

from __future__ import annotations

import torch

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group
from meshloom.exchange.buckets.reduction import Exact


class BF16(Exact):
    """All-reduces a rounded copy of the bucket as soon as it is complete, of gradients in float64, too."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._sums = TravellingSums(group, torch.bfloat16, never_cast=())

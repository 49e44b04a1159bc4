"""Gradients are sent as bfloat16: half the bytes of float32, 8 bits of mantissa, the same range.

Each rank rounds what it sends, and sums are rounded on the way. There is no error feedback: rounding errors
of single steps have no direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.steps import Steps
from meshloom.core.losses.loss_scale import Divisor, divides
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class BF16(Reduction):
    """All-reduces a rounded copy of the bucket as soon as it is complete."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: list[tuple[Bucket, Tensor, Work]] = []

    def start(self, bucket: Bucket) -> None:
        rounded = _real(bucket.flat).to(torch.bfloat16, copy=True)
        self._sent.append((bucket, rounded, self._group.all_reduce(rounded)))

    def finish(self, buckets: Sequence[Bucket], divisor: Divisor) -> Steps[None]:
        yield
        for bucket, rounded, work in self._sent:
            work.wait()
            _real(bucket.flat).copy_(rounded)
            if divides(divisor):
                bucket.flat[: bucket.length].div_(divisor)
        self._sent.clear()

    def expected_bytes(self, buckets: Sequence[Bucket]) -> ExpectedBytes:
        num_bytes = sum(2 * _real(bucket.flat).numel() for bucket in buckets)
        return ExpectedBytes(per_step=Traffic.along("dp", all_reduce=num_bytes))


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat

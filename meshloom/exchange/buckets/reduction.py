"""How the mean of a bucket of gradients over all ranks is computed: exactly, here; compressed, in a file for each way.

After a bucket's elements there are its *flags*: one number per parameter, 1 where this rank has a gradient of
it, else 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group, Work
from meshloom.core.losses.loss_sum import Divisor, divides
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class Reduction(ABC):
    """One way to compute it. Buckets have the same layout on all ranks, and start in one order."""

    @abstractmethod
    def start(self, bucket: Bucket) -> None:
        """A bucket is complete on this rank: elements and flags. Never waits."""

    @abstractmethod
    def finish(self, buckets: Sequence[Bucket], divisor: Divisor) -> None:
        """Turns every bucket, all of which have started, into the sum over ranks divided by `divisor`, with
        the same bits on all of them; its flags into the plain sum."""

    @abstractmethod
    def expected_bytes(self, buckets: Sequence[Bucket]) -> ExpectedBytes:
        """Bytes that this rank hands over for these buckets."""


class Exact(Reduction):
    """All-reduces the bucket uncompressed, as soon as it is complete. travels: what it does that as; None: its own dtype."""

    def __init__(self, group: Group, travels: torch.dtype | None = None) -> None:
        self._sums = TravellingSums(group, travels)
        self._works: list[Work] = []

    def start(self, bucket: Bucket) -> None:
        self._works.append(self._sums.all_reduce(bucket.flat))

    def finish(self, buckets: Sequence[Bucket], divisor: Divisor) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        for bucket in buckets if divides(divisor) else ():
            bucket.flat[: bucket.length].div_(divisor)

    def expected_bytes(self, buckets: Sequence[Bucket]) -> ExpectedBytes:
        num_bytes = sum(self._sums.num_bytes(each.flat.numel(), each.flat.dtype) for each in buckets)
        return ExpectedBytes(per_step=Traffic.along("dp", all_reduce=num_bytes))

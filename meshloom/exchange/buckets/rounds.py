"""Reduce-scatters of buckets that are under way, and the memory that buckets have from their first gradient
until then.

    pool      [ bucket 3, being sent | bucket 4, being filled |      ]      of its slice of each bucket's sum a rank has memory of its own
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group, Work
from meshloom.comm.windows import Extent, Windows, allocation, separate, window_bytes
from meshloom.exchange.buckets.buckets import BucketEntry
from meshloom.exchange.buckets.pool import Pool

POOL_BUCKETS = 4  # of the size that a plan names: one is filled while others are sent; buckets may be larger


@dataclass
class BucketPlace:
    """A parameter in its bucket. chunks: those of which its gradient is complete. filled: whether the memory
    that the bucket has now contains a gradient of it."""

    bucket: ScatteredBucket
    number: int  # in the bucket
    entry: BucketEntry
    chunks: int = 0
    filled: bool = False

    @property
    def view(self) -> Tensor:
        return self.bucket.views[self.number]


@dataclass
class ScatteredBucket:
    """A bucket, and this rank's slice of its sum. rounds: in a step; sent: so far. late: its gradients are
    complete at the end of a step only.

    flat: the memory that it has now; None: none. missing: the number of parameters whose gradient for the
    next round is not complete.
    """

    number: int
    entries: Sequence[BucketEntry]
    length: int
    extent: Extent
    gaps: Sequence[tuple[int, int]]  # elements of it that are no parameter's
    sum: Tensor
    rounds: int
    late: bool
    sent: int = 0
    missing: int = 0
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list[Tensor])
    places: list[BucketPlace] = field(default_factory=list[BucketPlace])

    def count(self) -> None:
        """Finds `missing`."""
        self.missing = sum(place.chunks <= self.sent for place in self.places)

    @property
    def is_complete(self) -> bool:
        """Whether its next round can start."""
        return self.sent < self.rounds and not self.missing


@dataclass(frozen=True)
class _Round:
    """A reduce-scatter under way from `flat` to `out`."""

    bucket: ScatteredBucket
    flat: Tensor
    out: Tensor
    work: Work
    is_first: bool


class RoundsUnderWay:
    """The rounds that this rank has started over `group`, first in, first out.

    buckets: all. windows: `group`, if its ranks can share memory, where the pool then lies. sums: over
    `group`. In a step it `waits` for earlier rounds where the pool is short, or takes more memory.
    """

    def __init__(
        self, buckets: Sequence[ScatteredBucket], group: Group, windows: Windows | None, bucket_bytes: int, sums: TravellingSums
    ) -> None:  # fmt: skip
        self._group, self._windows, self._sums = group, windows, sums
        self.pools = {
            device: Pool(allocation(windows, group.rank)([extent])[0])
            for device, extent in pool_extents([each.extent for each in buckets], bucket_bytes).items()
        }
        self._started: deque[_Round] = deque()
        self._waits = True

    def begin(self, *, waits: bool) -> None:
        """Forgets the previous step's, if it did not end."""
        self._started.clear()
        for pool in self.pools.values():
            pool.clear()
        self._waits = waits

    def open(self, bucket: ScatteredBucket) -> None:
        """Gives a bucket memory, unless it has some."""
        if bucket.flat is not None:
            return
        pool = self.pools[bucket.extent.device]
        flat = pool.take(bucket.extent)
        while flat is None and self._started and (self._waits or self._started[0].work.is_finished()):
            self._end_one()
            flat = pool.take(bucket.extent)
        if flat is None:  # too many are filled at the same time, or wait until the order lets them start
            flat = separate([bucket.extent])[0]
        bucket.flat = flat
        bucket.views = [
            flat[entry.start : entry.stop].view(entry.parameter.shape) for entry in bucket.entries
        ]

    def start(self, bucket: ScatteredBucket) -> None:
        """Starts the bucket's next round; its memory is no longer its own."""
        flat, share = bucket.flat, bucket.sum.numel()
        assert flat is not None
        pool = self.pools[bucket.extent.device]
        if self._group.is_in_place or (self._windows is not None and pool.holds(flat)):
            out = flat[self._group.rank * share : (self._group.rank + 1) * share]
        else:
            out = torch.empty_like(bucket.sum) if bucket.sent else bucket.sum
        work = self._sums.reduce_scatter(out, flat)
        self._started.append(_Round(bucket, flat, out, work, is_first=not bucket.sent))
        bucket.flat, bucket.views, bucket.sent = None, [], bucket.sent + 1

    def end(self) -> None:
        """Waits for all rounds, and adds them to the sums."""
        while self._started:
            self._end_one()

    def _end_one(self) -> None:
        done = self._started.popleft()
        done.work.wait()
        if done.out is not done.bucket.sum:
            done.bucket.sum.copy_(done.out) if done.is_first else done.bucket.sum.add_(done.out)
        self.pools[done.bucket.extent.device].give(done.flat)


def pool_bytes(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Bytes of the memory that buckets of these sizes share: room for `POOL_BUCKETS` of the size that the
    plan names, at least for the largest one, and for no more than all of them.

    >>> pool_bytes([10, 10, 10, 10, 10], 5), pool_bytes([10, 30, 10], 5), pool_bytes([10], 5)
    (20, 30, 10)
    """
    return min(sum(sizes), max(POOL_BUCKETS * bucket_bytes, *sizes)) if sizes else 0


def pool_extents(extents: Sequence[Extent], bucket_bytes: int) -> dict[torch.device, Extent]:
    """The memory that buckets of these extents share, on each device."""
    pools: dict[torch.device, Extent] = {}
    for device in dict.fromkeys(each.device for each in extents):
        sizes = [window_bytes([each]) for each in extents if each.device == device]
        pools[device] = Extent(num_elements=pool_bytes(sizes, bucket_bytes), dtype=torch.uint8, device=device)
    return pools

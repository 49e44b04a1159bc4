"""Error feedback: what compression drops from a gradient is added to the next one, so that it arrives late
but is not lost.

Source: Seide et al., "1-bit stochastic gradient descent" (2014); Karimireddy et al., "Error feedback fixes
    SignSGD" (2019).

    sent + error  =  gradient + error of the step before            on each rank, for each element

The error of a parameter that no rank used in a step is kept for the next one. Errors are those of this rank's
own contribution; they differ between ranks and are not part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.losses.loss_sum import Divisor, divides
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.buckets.flags import used_anywhere
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class ErrorFeedback:
    """The errors of all elements of some buckets."""

    def __init__(self) -> None:
        self._errors: list[Tensor] = []
        self._used: list[list[bool]] = []

    def begin(self, buckets: Sequence[Bucket], divisor: Divisor, group: Group) -> None:
        """All-reduces the flags, and turns each bucket into this rank's contribution to the mean (its
        gradients over `divisor`) plus its errors."""
        works = [group.all_reduce(bucket.flat[bucket.length :]) for bucket in buckets]
        if not self._errors:
            self._errors = [torch.zeros_like(bucket.flat[: bucket.length]) for bucket in buckets]
        for work in works:
            work.wait()
        self._used = [
            used_anywhere([entry.arrived for entry in bucket.entries], bucket.flat[bucket.length :])
            for bucket in buckets
        ]
        for index, bucket in enumerate(buckets):
            if divides(divisor):
                bucket.flat[: bucket.length].div_(divisor)
            for start, stop in self._places(index, bucket):
                bucket.flat[start:stop].add_(self._errors[index][start:stop])

    def keep(self, index: int, bucket: Bucket, left: Tensor) -> None:
        """Keeps `left` [length], what was not sent of bucket number `index`."""
        for start, stop in self._places(index, bucket):
            self._errors[index][start:stop] = left[start:stop]

    def expected_bytes(self, buckets: Sequence[Bucket]) -> ExpectedBytes:
        """Bytes of the flags that `begin` all-reduces."""
        flags = sum(bucket.flat[bucket.length :].nbytes for bucket in buckets)
        return ExpectedBytes(per_step=Traffic.along("dp", all_reduce=flags))

    def _places(self, index: int, bucket: Bucket) -> list[tuple[int, int]]:
        """Start and stop of the parameters that some rank used."""
        return [
            (entry.start, entry.stop)
            for entry, used in zip(bucket.entries, self._used[index], strict=True)
            if used
        ]

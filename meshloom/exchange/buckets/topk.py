"""Of each bucket the elements with the largest magnitudes on the rank are sent with their indices, with error
feedback.

Source: Aji & Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); with error feedback as
in Stich et al., "Sparsified SGD with Memory" (2018).

    rank 0    [ .1  -9   .2   .3   7 ]   sends -9 at 1, 7 at 4       all ranks   [ 0  -14  0  6  7 ]
    rank 1    [ .2  -5   .1    6  .4 ]   sends -5 at 1, 6 at 3
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.core.losses.loss_sum import Divisor
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.buckets.error_feedback import ErrorFeedback
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class TopK(Reduction):
    """share: of a bucket's elements, above 0 and up to 1; at least one element is sent. Messages are sent
    after backward."""

    def __init__(self, group: Group, share: float) -> None:
        self._group = group
        self._share = share
        self._errors = ErrorFeedback()

    def start(self, bucket: Bucket) -> None:
        pass

    def finish(self, buckets: Sequence[Bucket], divisor: Divisor) -> None:
        self._errors.begin(buckets, divisor, self._group)
        received: list[tuple[Bucket, Tensor, Tensor]] = []
        works: list[Work] = []
        for index, bucket in enumerate(buckets):
            flat = bucket.flat[: bucket.length]
            chosen = flat.abs().topk(self._count(bucket), sorted=False).indices
            values = flat[chosen]
            left = flat.clone()
            left[chosen] = 0
            self._errors.keep(index, bucket, left)
            places = torch.empty(self._group.size * len(chosen), dtype=torch.int32, device=flat.device)
            everyone = flat.new_empty(self._group.size * len(chosen))
            works += [self._group.all_gather(places, chosen.int()), self._group.all_gather(everyone, values)]
            received.append((bucket, places, everyone))
        for work in works:
            work.wait()
        for bucket, places, everyone in received:
            flat = bucket.flat[: bucket.length].zero_()
            for where, what in zip(
                places.view(self._group.size, -1), everyone.view(self._group.size, -1), strict=True
            ):
                # a rank's indices are distinct, so sums are in rank order
                flat.index_add_(0, where, what)

    def expected_bytes(self, buckets: Sequence[Bucket]) -> ExpectedBytes:
        chosen = sum(self._count(bucket) * (4 + bucket.flat.element_size()) for bucket in buckets)
        flags = self._errors.expected_bytes(buckets)
        return flags + ExpectedBytes(per_step=Traffic.along("dp", all_gather=chosen))

    def _count(self, bucket: Bucket) -> int:
        return min(bucket.length, max(1, math.ceil(self._share * bucket.length)))

"""ZeRO-1: every replica receives one dp-th of the summed gradients, updates the parameters that belong to it,
and gathers the others.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
    stage 1.

                 bucket of gradients          bucket of parameters
    rank 0       [ sum | ... | ... ]          [ updated | <- gathered ------> ]
    rank 1       [ ... | sum | ... ]          [ <------ | updated | <-------- ]
    rank 2       [ ... | ... | sum ]          [ <---------------- | updated   ]

Ranks of one host may share one bucket of parameters; then nothing is gathered (`shared.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group
from meshloom.comm.windows import Windows, allocation
from meshloom.exchange.buckets.buckets import Bucket, BucketLayout, GradientBuckets
from meshloom.exchange.copies import OneEach, ParameterCopies, gather_shares, segment
from meshloom.exchange.sharded import Sharded
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class ZeroOne(Sharded):
    """Reduce-scatters gradients over `group`.

    windows: `group`, if its ranks can share memory. In that case, and where the group works in place,
    gradients are summed in place.

    in_order: as of `GradientBuckets`. copies: builds the storage of the parameters, from the gradients' buckets and the group. travels: what gradients travel as;
    None: their own dtype.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        bucket_bytes: int,
        overlap: bool,
        replicated: Collection[str] = (),
        in_order: bool = False,
        travels: torch.dtype | None = None,
        windows: Windows | None = None,
        copies: Callable[[Sequence[BucketLayout], Group], ParameterCopies] = OneEach,
    ) -> None:
        buckets = GradientBuckets(
            named,
            bucket_bytes=bucket_bytes,
            start=self._start,
            overlap=overlap,
            multiple=group.size,
            replicated=replicated,
            in_order=in_order,
            allocate=allocation(windows, group.rank),
        )
        super().__init__(buckets, group, group.size, copies(buckets.buckets, group))
        self._travelling = TravellingSums(group, travels)
        shares = [segment(bucket.flat, group) for bucket in buckets.buckets]
        self._gradients = (
            shares if windows or group.is_in_place else [torch.zeros_like(share) for share in shares]
        )
        self._mine.expect(self._gradients)
        self._num_bytes = sum(
            self._travelling.num_bytes(each.flat.numel(), each.flat.dtype) for each in buckets.buckets
        )

    def _start(self, bucket: Bucket) -> None:
        bucket.flat[bucket.length :].zero_()
        self._works.append(self._travelling.reduce_scatter(self._gradients[bucket.number], bucket.flat))

    def _expected_bytes(self) -> ExpectedBytes:
        return ExpectedBytes(per_step=Traffic.along("dp", reduce_scatter=self._num_bytes))

    def _add_up(self) -> list[Tensor]:
        return self._gradients

    def _gather(self, whole: Tensor, share: Tensor | None) -> None:
        gather_shares(whole, share, self._group)

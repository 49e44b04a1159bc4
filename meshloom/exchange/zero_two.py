"""ZeRO-2: every replica holds only its slices of the gradients, too.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
    stage 2.

    zero=1    buckets of all gradients, summed over chunks; reduce-scattered once a step
    zero=2    slices of all gradients, and a few buckets; each chunk is reduce-scattered and added to the slices

So the gradients of m microbatches are sent m times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.windows import Windows
from meshloom.exchange.buckets.buckets import BucketLayout
from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.exchange.copies import OneEach, ParameterCopies, gather_shares
from meshloom.exchange.sharded import Sharded
from meshloom.telemetry.traffic import ExpectedBytes


class ZeroTwo(Sharded):
    """Reduce-scatters each chunk's gradients over `group`. The arguments are those of `ZeroOne` and of
    `ScatteredBuckets`."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        rounds: int,
        bucket_bytes: int,
        overlap: bool,
        replicated: Collection[str] = (),
        travels: torch.dtype | None = None,
        late: Collection[str] = (),
        windows: Windows | None = None,
        copies: Callable[[Sequence[BucketLayout], Group], ParameterCopies] = OneEach,
    ) -> None:
        self._scattered = ScatteredBuckets(
            named,
            group,
            rounds=rounds,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            replicated=replicated,
            late=late,
            windows=windows,
            travels=travels,
        )
        stored = copies(self._scattered.buckets, group)
        super().__init__(self._scattered, group, group.size, stored, each_chunk=True)

    def _expected_bytes(self) -> ExpectedBytes:
        return ExpectedBytes()

    def _add_up(self) -> list[Tensor]:
        return self._scattered.collect()

    def _gather(self, whole: Tensor, share: Tensor | None) -> None:
        gather_shares(whole, share, self._group)

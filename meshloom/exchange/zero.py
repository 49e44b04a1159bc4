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

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.comm.windows import Windows, allocation
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.copies import OneEach, ParameterCopies, segment
from meshloom.exchange.sharded import Sharded
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class ZeroOne(Sharded):
    """Reduce-scatters gradients over `group`. `copies` says where parameters lie and how updates become
    visible.

    windows: `group`, if its ranks can share memory. In that case, and where the group works in place,
    gradients are summed in place.

    copies: builds the storage of the parameters, from the gradients' buckets and the group.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        bucket_bytes: int,
        overlap: bool,
        replicated: Collection[str] = (),
        windows: Windows | None = None,
        copies: Callable[[Sequence[Bucket], Group], ParameterCopies] = OneEach,
    ) -> None:
        allocate = allocation(windows, group.rank)
        super().__init__(
            named,
            group,
            group.size,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            replicated=replicated,
            allocate=allocate,
        )
        shares = [segment(bucket.flat, group) for bucket in self._buckets.buckets]
        self._gradients = (
            shares if windows or group.is_in_place else [torch.zeros_like(share) for share in shares]
        )
        self._copies = copies(self._buckets.buckets, group)

    @property
    def one_copy(self) -> bool:
        return self._copies.is_shared

    def open(self) -> Steps[None]:
        yield from self._copies.open()

    def begin_step(self) -> None:
        super().begin_step()
        self._copies.begin_step()

    def publish(self) -> Steps[None]:
        yield from self._copies.publish()

    def _start(self, bucket: Bucket) -> None:
        bucket.flat[bucket.length :].zero_()
        self._works.append(self._group.reduce_scatter(self._gradients[bucket.number], bucket.flat))

    def _computed(self) -> None:
        self._copies.computed()

    def _expected_bytes(self) -> ExpectedBytes:
        total = sum(bucket.num_bytes for bucket in self._buckets.buckets)
        scattered = ExpectedBytes(per_step=Traffic.along("dp", reduce_scatter=total))
        return scattered + self._copies.expected_bytes()

    def _add_up(self) -> list[Tensor]:
        return self._gradients

    def _gather(self, whole: Tensor, share: Tensor | None) -> Steps[None]:
        assert share is not None
        work = self._group.all_gather(whole, share)
        yield
        work.wait()

"""Every replica receives one dp-th of the summed gradients, owns and updates that, and the others get to see
it (ZeRO-1).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
    stage 1.

                 bucket of gradients          bucket of parameters
    rank 0       [ sum | ... | ... ]          [ updated | <- gathered ------> ]
    rank 1       [ ... | sum | ... ]          [ <------ | updated | <-------- ]
    rank 2       [ ... | ... | sum ]          [ <---------------- | updated   ]

On one host there may be one bucket of parameters for all ranks, and nothing is gathered (`shared.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.comm.windows import Windows, allocation
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.copies import Copies, OneEach, segment
from meshloom.exchange.sharded import Sharded
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class ZeroOne(Sharded):
    """Gradients are reduce-scattered over `group`; where parameters lie and how updates become visible,
    `copies` knows.

    windows: `group`, if its ranks can have memory in common. Then, and where the group works in place,
        gradients are summed where they lie, a rank's share in its place.
    copies: makes the home of the parameters, of the gradients' buckets and the group.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        bucket_bytes: int,
        overlap: bool,
        apart: Collection[str] = (),
        windows: Windows | None = None,
        copies: Callable[[Sequence[Bucket], Group], Copies] = OneEach,
    ) -> None:
        allocate = allocation(windows, group.rank)
        super().__init__(
            named,
            group,
            group.size,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            apart=apart,
            allocate=allocate,
        )
        shares = [segment(bucket.flat, group) for bucket in self._buckets.buckets]
        self._gradients = (
            shares if windows or group.is_in_place else [torch.zeros_like(share) for share in shares]
        )
        self._copies = copies(self._buckets.buckets, group)

    @property
    def one_copy(self) -> bool:
        return self._copies.is_one

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

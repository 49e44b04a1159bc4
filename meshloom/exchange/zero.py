"""Every replica receives one dp-th of the summed gradients, owns and updates that, and the others get to see it (ZeRO-1).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1.

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

from meshloom.comm.group import Group, Work
from meshloom.comm.steps import Steps
from meshloom.comm.windows import Windows, allocation
from meshloom.exchange.buckets.buckets import Bucket, GradientBuckets
from meshloom.exchange.copies import Copies, OneEach, segment
from meshloom.exchange.exchange import Exchange, Give, Slice
from meshloom.exchange.slices import OwnedSlices, Used, give_bucket
from meshloom.program.operators.fused_grad_accumulation import Room


class ZeroOne(Exchange):
    """Gradients are reduce-scattered over `group`; where parameters lie and how updates become visible, `copies` knows.

    windows: `group`, if its ranks can have memory in common. Then, and where the group works in place, gradients are summed where they lie, a rank's
        share in its place.
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
        self._group = group
        self._works: list[Work] = []
        self._buckets = GradientBuckets(
            named,
            bucket_bytes=bucket_bytes,
            start=self._start,
            overlap=overlap,
            multiple=group.size,
            apart=apart,
            allocate=allocation(windows, group.rank),
        )
        shares = [segment(bucket.flat, group) for bucket in self._buckets.buckets]
        self._gradients = shares if windows or group.is_in_place else [torch.zeros_like(share) for share in shares]
        self._copies = copies(self._buckets.buckets, group)
        self._used = Used(self._buckets.buckets, group)
        self._is_used: list[bool] = []
        self._mine = OwnedSlices(self._buckets.buckets, group.rank, group.size)

    @property
    def owned(self) -> Sequence[Slice]:
        return self._mine.slices

    @property
    def owners(self) -> Group:
        return self._group

    @property
    def one_copy(self) -> bool:
        return self._copies.is_one

    def open(self) -> Steps[None]:
        yield from self._copies.open()

    def begin_step(self) -> None:
        self._works.clear()
        self._buckets.begin_step()
        self._copies.begin_step()

    def begin_last_chunk(self) -> None:
        self._buckets.begin_last_chunk()

    def room(self, parameter: Tensor) -> Room | None:
        return self._buckets.room(parameter)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        self._buckets.gradient_ready(parameter)

    def finish(self, weight: Tensor) -> Steps[list[Tensor | None]]:
        self._buckets.start_rest()
        self._copies.computed()
        # Started here and not before: who has waited for it knows that nobody computes with the old parameters any more.
        self._works.append(self._used.start())
        yield
        for work in self._works:
            work.wait()
        divisor = float(weight)
        for gradient in self._gradients if divisor != 1.0 else ():
            gradient.div_(divisor)
        self._is_used = self._used.found()
        yield from self._buckets.share_order(self._group)
        return self._mine.gradients(self._gradients, self._is_used)

    def publish(self) -> Steps[None]:
        yield from self._copies.publish()

    def each_gradient(self, gradients: list[Tensor | None], give: Give) -> Steps[None]:
        is_used = iter(self._is_used)
        for bucket, piece in zip(self._buckets.buckets, self._mine.shares(gradients, self._gradients), strict=True):
            whole = torch.zeros_like(bucket.flat)
            work = self._group.all_gather(whole, piece)
            yield
            work.wait()
            yield from give_bucket(bucket, whole, is_used, give)

    def bytes_per_step(self) -> dict[str, int]:
        total = sum(bucket.num_bytes for bucket in self._buckets.buckets)
        return {"reduce_scatter": total, "all_reduce": self._used.num_bytes, **self._copies.bytes_per_step()}

    def bytes_once(self) -> dict[str, int]:
        return {"broadcast": 8 * len(self._buckets.buckets)}

    def _start(self, bucket: Bucket) -> None:
        bucket.flat[bucket.length :].zero_()
        self._works.append(self._group.reduce_scatter(self._gradients[bucket.number], bucket.flat))

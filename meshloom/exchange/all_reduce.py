"""Gradients are all-reduced: every replica receives all sums, owns all parameters and makes the same
update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.windows import Windows, allocation
from meshloom.core.losses.loss_sum import Divisor
from meshloom.core.step_shape import StepShape
from meshloom.exchange.alone import Alone
from meshloom.exchange.buckets.buckets import Bucket, GradientBuckets
from meshloom.exchange.buckets.flags import set_flags, used_anywhere
from meshloom.exchange.buckets.reduction import Exact, Reduction
from meshloom.exchange.exchange import Exchange, Ready
from meshloom.exchange.registry import Setup
from meshloom.exchange.shared import OneForAll
from meshloom.exchange.zero import ZeroOne
from meshloom.exchange.zero_three import open_zero_three
from meshloom.exchange.zero_two import ZeroTwo
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes


def open_all_reduce(setup: Setup) -> Exchange:
    """The all-reduce of gradients or, with zero=1, 2 and where replicas share one copy of the parameters, the
    reduce-scatter to the owner of each slice."""
    plan, settings = setup.plan, setup.bucket_settings
    windows = None if setup.travels else setup.windows  # a copy travels, not what lies there
    zero: Callable[..., Exchange] = partial(ZeroOne, in_order=plan.tp > 1)
    if plan.zero == 2:
        zero = partial(ZeroTwo, rounds=plan.microbatches, late=setup.late)
    if plan.compress != "none":
        setup.fill_parameters()
        return AllReduce(setup.dense, setup.group, reduction=setup.reduction(), **settings)
    if windows is not None and setup.may_share():
        if not setup.dense:
            setup.fill_parameters()
            return Alone([])
        copies = partial(OneForAll, windows=windows, frozen=setup.frozen, unfilled=setup.unfilled)
        return zero(setup.dense, setup.group, windows=windows, copies=copies, **settings)
    if plan.zero == 3:
        return open_zero_three(setup)
    setup.fill_parameters()
    if not plan.zero:
        exact = partial(Exact, travels=setup.travels)
        return AllReduce(setup.dense, setup.group, windows=windows, reduction=exact, **settings)
    return zero(setup.dense, setup.group, windows=windows, travels=setup.travels, **settings)


class AllReduce(Alone):
    """Sums gradients over `group`, bucket by bucket, while backward is running.

    After a bucket's gradients there is one flag per parameter: the number of ranks on which it was used. If
    that is none, the gradient is None, as on one device.

    reduction: of the group; how the sums are computed, exactly or compressed. windows: `group`, if its ranks
    can share memory; gradients are then summed in place.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        bucket_bytes: int,
        overlap: bool,
        replicated: Collection[str] = (),
        reduction: Callable[[Group], Reduction] = Exact,
        windows: Windows | None = None,
    ) -> None:
        self._group = group
        super().__init__(named)
        self._reduction = reduction(group)
        self._buckets = GradientBuckets(
            named,
            bucket_bytes=bucket_bytes,
            start=self._start,
            overlap=overlap,
            num_extra=lambda num_entries: num_entries,
            replicated=replicated,
            allocate=allocation(windows, group.rank),
        )

    def begin(self, shape: StepShape) -> None:
        self._buckets.begin(shape)

    def end_chunk(self) -> None:
        self._buckets.end_chunk()

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        return self._buckets.buffer(parameter)

    def hook(self, parameter: nn.Parameter) -> Ready:
        return self._buckets.hook(parameter)

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        self._buckets.start_rest()
        self._reduction.finish(self._buckets.buckets, weight)
        gradients: dict[str, Tensor | None] = {}
        for bucket in self._buckets.buckets:
            used = bucket.flat[bucket.length : bucket.length + len(bucket.entries)]
            for entry, is_used in zip(
                bucket.entries, used_anywhere([each.arrived for each in bucket.entries], used), strict=True
            ):
                gradients[entry.name] = bucket.flat[entry.start : entry.stop] if is_used else None
        if not self._buckets.order_is_shared:
            self._buckets.share_order(self._group)
        return [gradients[slice_.name] for slice_ in self._owned]

    def expected_bytes(self) -> ExpectedBytes:
        return self._reduction.expected_bytes(self._buckets.buckets) + self._buckets.expected_bytes()

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            set_flags(bucket.flat[bucket.length :], [entry.arrived for entry in bucket.entries])
        self._reduction.start(bucket)

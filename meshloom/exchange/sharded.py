"""Exchanges in which each element has one owner, split evenly by bytes: all replicas own a share under
zero=1 and 2, the servers own all under exchange=server."""

from __future__ import annotations

from abc import abstractmethod
from itertools import zip_longest

from torch import Tensor, nn

from meshloom.comm.group import Group, Work
from meshloom.comm.windows import separate
from meshloom.core.losses.loss_sum import Divisor, divides
from meshloom.core.step_shape import StepShape
from meshloom.exchange.buckets.buckets import GradientBuckets
from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.exchange.copies import ParameterCopies
from meshloom.exchange.exchange import Emit, Exchange, Ownership, Ready
from meshloom.exchange.slices import OwnedSlices, UsedFlags, emit_bucket
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class Sharded(Exchange):
    """The first `num_owners` ranks of `group` own an even share of each bucket. `copies` says where parameters
    lie and how updates become visible. each_chunk: as of `Ownership`."""

    def __init__(
        self,
        buckets: GradientBuckets | ScatteredBuckets,
        group: Group,
        num_owners: int,
        copies: ParameterCopies,
        *,
        each_chunk: bool = False,
    ) -> None:
        self._group = group
        self._num_owners = num_owners
        self._copies = copies
        self._works: list[Work] = []
        self._is_published = True  # whether this step has; else that of an evaluation of averages is one more
        self._again = 0  # these
        self._buckets = buckets
        self._used = UsedFlags(buckets.buckets, group)
        self._mine = OwnedSlices(buckets.buckets, group.rank, num_owners)
        self._is_used: list[bool] = []  # of every entry, in the newest step
        self._sums: list[Tensor] = []  # this rank's share of each bucket's sum, of the newest step
        self.ownership = Ownership(
            owned=self._mine.slices,
            owners=group,
            num_owners=num_owners,
            memory=copies.memory,
            each_chunk=each_chunk,
        )

    def begin(self, shape: StepShape) -> None:
        self._works.clear()
        self._is_published = False
        self._buckets.begin(shape)

    def end_chunk(self) -> None:
        self._buckets.end_chunk()

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        return self._buckets.buffer(parameter)

    def hook(self, parameter: nn.Parameter) -> Ready:
        return self._buckets.hook(parameter)

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        self._buckets.start_rest()
        # Not started earlier: a rank that has waited for it knows that no rank computes with the old
        # parameters any more.
        self._works.append(self._used.start())
        for work in self._works:
            work.wait()
        self._sums = self._add_up()
        for each in self._sums if divides(weight) else ():
            each.div_(weight)
        self._is_used = self._used.found()
        if not self._buckets.order_is_shared:
            self._buckets.share_order(self._group)
        return self._mine.gradients(self._sums, self._is_used)

    def publish(self) -> bool:
        self._again += self._is_published
        self._is_published = True
        self._copies.publish()
        return False

    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        is_used = iter(self._is_used)
        # a rank that owns nothing has no shares
        for bucket, share in zip_longest(self._buckets.buckets, self._mine.shares(gradients, self._sums)):
            whole = separate([bucket.extent])[0]
            self._gather(whole, share)
            emit_bucket(bucket, whole, is_used, emit)

    def expected_bytes(self) -> ExpectedBytes:
        flags, values = Traffic.along("dp", all_reduce=self._used.num_bytes), self._copies.traffic
        own = ExpectedBytes(per_step=flags + values, so_far=values * self._again)
        return own + self._buckets.expected_bytes() + self._expected_bytes()

    @abstractmethod
    def _expected_bytes(self) -> ExpectedBytes:
        """Bytes of gradients."""

    @abstractmethod
    def _add_up(self) -> list[Tensor]:
        """This rank's share of each bucket's sum, after all started work has been waited for."""

    @abstractmethod
    def _gather(self, whole: Tensor, share: Tensor | None) -> None:
        """Fills a flat tensor of zeros with a bucket's layout with the shares of all owners; this rank's is
        `share`."""

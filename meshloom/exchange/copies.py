"""Where replicas store the parameters of which each owns slices, and how the owners' updates reach the
others.

Parameters lie in flat buckets with the layout of the gradients' buckets, so that a rank's share of a bucket
is one contiguous piece of both. Their shapes, names and identity stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from meshloom.comm.group import Group
from meshloom.exchange.buckets.buckets import BucketLayout
from meshloom.exchange.exchange import Memory
from meshloom.exchange.slices import flatten_parameters, share_of
from meshloom.telemetry.traffic import Traffic


class ParameterCopies(ABC):
    """One copy of the parameters for each replica, or one for several. memory: as of `Ownership`. traffic: of
    a `publish`."""

    memory: Memory = "whole"
    traffic = Traffic()

    @abstractmethod
    def publish(self) -> None:
        """Returns when the updates of all owners can be read here."""


class OneEach(ParameterCopies):
    """A copy for every replica; slices of other owners are all-gathered."""

    def __init__(self, buckets: Sequence[BucketLayout], group: Group) -> None:
        self._group = group
        self._flats = [flatten_parameters(bucket) for bucket in buckets]
        self.traffic = Traffic.along(
            "dp", all_gather=sum(segment(flat, group).nbytes for flat in self._flats)
        )

    def publish(self) -> None:
        own = [segment(flat, self._group) for flat in self._flats]
        works = [
            self._group.all_gather(flat, part if self._group.is_in_place else part.clone())
            for flat, part in zip(self._flats, own, strict=True)
        ]
        for work in works:
            work.wait()


def segment(flat: Tensor, group: Group) -> Tensor:
    """This rank's share [n] of a bucket [size * n]."""
    return share_of(flat, group.rank, group.size)


def gather_shares(whole: Tensor, share: Tensor | None, group: Group) -> None:
    """Fills a tensor [size * n] with the ranks' shares [n], of which this rank's is `share`."""
    assert share is not None
    group.all_gather(whole, share).wait()

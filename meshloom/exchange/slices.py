"""Buckets divided evenly over owners: which elements of which parameters each of them has.

bucket       | head.weight   | head.bias | blocks.1...        | padding |
3 owners     | owner 0           | owner 1          | owner 2           |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.steps import Steps
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.exchange import Give, Slice


class OwnedSlices:
    """What one owner has of buckets whose lengths are multiples of `num_owners`; nothing if `owner` is none
    of them."""

    def __init__(self, buckets: Sequence[Bucket], owner: int, num_owners: int) -> None:
        self.slices: list[Slice] = []
        self._positions: list[
            tuple[int, int, int, int]
        ] = []  # (bucket, start and stop within the owner's share of it, number of the entry among all)
        number = 0
        for index, bucket in enumerate(buckets):
            length = bucket.flat.numel() // num_owners
            first = owner * length
            for entry in bucket.entries:
                start, stop = max(entry.start, first), min(entry.stop, first + length)
                if start < stop and owner < num_owners:
                    self.slices.append(
                        Slice(entry.name, entry.parameter, start - entry.start, stop - entry.start)
                    )
                    self._positions.append((index, start - first, stop - first, number))
                number += 1

    def gradients(self, shares: Sequence[Tensor], is_used: Sequence[bool]) -> list[Tensor | None]:
        """Of each slice, its elements of the owner's share [n] of each bucket; None if the parameter is not
        used. is_used: of every entry."""
        return [
            shares[index][start:stop] if is_used[number] else None
            for index, start, stop, number in self._positions
        ]

    def shares(self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
        """The inverse: the owner's share of each bucket, as those in `like`, zero elsewhere."""
        shares = [torch.zeros_like(each) for each in like]
        for each, (index, start, stop, _) in zip(gradients, self._positions, strict=True):
            if each is not None:
                shares[index][start:stop] = each
        return shares


class Used:
    """Which parameters of some buckets any rank has used in a step."""

    def __init__(self, buckets: Sequence[Bucket], group: Group) -> None:
        self._entries = [entry for bucket in buckets for entry in bucket.entries]
        self._group = group
        self._flags = torch.zeros(len(self._entries), dtype=torch.uint8, device=buckets[0].flat.device)

    def start(self) -> Work:
        """Tell the other ranks what has arrived here."""
        self._flags.copy_(torch.tensor([entry.arrived for entry in self._entries], dtype=torch.uint8))
        return self._group.all_reduce(self._flags, "max")

    def found(self) -> list[bool]:
        """Of every entry, once what `start` returned has been waited for."""
        return [bool(each) for each in self._flags.tolist()]

    @property
    def num_bytes(self) -> int:
        """That a step hands to all_reduce."""
        return self._flags.numel()


def share_of(flat: Tensor, owner: int, num_owners: int) -> Tensor:
    """An owner's share [n] of what is laid out like a bucket [num_owners * n]."""
    length = flat.numel() // num_owners
    return flat[owner * length : (owner + 1) * length]


def give_bucket(bucket: Bucket, flat: Tensor, is_used: Iterator[bool], give: Give) -> Steps[None]:
    """Give the whole gradients in a flat one that is laid out like `bucket`. is_used: of every entry,
    beginning with its first."""
    for entry in bucket.entries:
        yield from give(
            entry.name, flat[entry.start : entry.stop].view(entry.parameter.shape) if next(is_used) else None
        )


def move_into_flat(bucket: Bucket) -> Tensor:
    """A bucket of the parameters' values, which the parameters then share. Their shapes, names and identity
    stay."""
    flat = torch.zeros_like(bucket.flat)
    for entry in bucket.entries:
        view = flat[entry.start : entry.stop].view(entry.parameter.shape)
        view.copy_(entry.parameter.data)
        entry.parameter.data = view
    return flat

"""Buckets split evenly over owners: which elements of which parameters each owner has.

bucket       | head.weight   | head.bias | blocks.1...        | padding |
3 owners     | owner 0           | owner 1          | owner 2           |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.windows import separate
from meshloom.exchange.buckets.buckets import BucketLayout
from meshloom.exchange.buckets.flags import set_flags, used_anywhere
from meshloom.exchange.exchange import Emit, Slice


class OwnedSlices:
    """The slices that one owner has of buckets whose lengths are multiples of `num_owners`; none if `owner`
    is not one of them."""

    def __init__(self, buckets: Sequence[BucketLayout], owner: int, num_owners: int) -> None:
        self.slices: list[Slice] = []
        self._positions: list[
            tuple[int, int, int, int]
        ] = []  # (bucket, start and stop within the owner's share of it, number of the entry among all)
        self._views: tuple[Sequence[Tensor], list[Tensor]] | None = None  # of shares that stay
        number = 0
        for index, bucket in enumerate(buckets):
            length = bucket.extent.num_elements // num_owners
            first = owner * length
            for entry in bucket.entries:
                # one without elements has an owner, too, and so a gradient and state
                ends = entry.start, max(entry.stop - 1, entry.start)
                owners = [min(element // max(length, 1), num_owners - 1) for element in ends]
                if owners[0] <= owner <= owners[1]:
                    start, stop = max(entry.start, first), min(entry.stop, first + length)
                    self.slices.append(
                        Slice(entry.name, entry.parameter, start - entry.start, stop - entry.start)
                    )
                    self._positions.append((index, start - first, stop - first, number))
                number += 1

    def gradients(self, shares: Sequence[Tensor], is_used: Sequence[bool]) -> list[Tensor | None]:
        """The gradient of each slice, from the owner's share [n] of each bucket; None if the parameter was
        not used. is_used: of every entry."""
        views = self._views[1] if self._views and self._views[0] is shares else self._views_of(shares)
        return [
            view if is_used[number] else None
            for view, (_, _, _, number) in zip(views, self._positions, strict=True)
        ]

    def expect(self, shares: Sequence[Tensor]) -> None:
        """`gradients` will be those of these shares, which stay where they are."""
        self._views = shares, self._views_of(shares)

    def _views_of(self, shares: Sequence[Tensor]) -> list[Tensor]:
        return [shares[index][start:stop] for index, start, stop, _ in self._positions]

    def shares(self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
        """The inverse: the owner's share of each bucket, shaped like those in `like`, zero where there is no
        slice."""
        shares = [torch.zeros_like(each) for each in like]
        for each, (index, start, stop, _) in zip(gradients, self._positions, strict=True):
            if each is not None:
                shares[index][start:stop] = each
        return shares


class UsedFlags:
    """Which parameters of some buckets were used on any rank in a step."""

    def __init__(self, buckets: Sequence[BucketLayout], group: Group) -> None:
        self._entries = [entry for bucket in buckets for entry in bucket.entries]
        self._group = group
        self._flags = torch.zeros(len(self._entries), dtype=torch.uint8, device=buckets[0].extent.device)
        self._here: list[bool] = []  # of the gradients of this rank

    def start(self) -> Work:
        """Starts to sum the flags of the gradients that have arrived here."""
        self._here = [entry.arrived for entry in self._entries]
        set_flags(self._flags, self._here)
        return self._group.all_reduce(self._flags, "max")

    def found(self) -> list[bool]:
        """Whether each entry was used, after the work that `start` returned."""
        return used_anywhere(self._here, self._flags)

    @property
    def num_bytes(self) -> int:
        """Bytes handed to all_reduce in a step."""
        return self._flags.numel()


def share_of(flat: Tensor, owner: int, num_owners: int) -> Tensor:
    """An owner's share [n] of a tensor with a bucket's layout [num_owners * n]."""
    length = flat.numel() // num_owners
    return flat[owner * length : (owner + 1) * length]


def emit_bucket(bucket: BucketLayout, flat: Tensor, is_used: Iterator[bool], emit: Emit) -> None:
    """Passes the gradients in a flat tensor with the layout of `bucket` to `emit`. is_used: an iterator over
    all entries, at the first one of this bucket."""
    for entry in bucket.entries:
        emit(
            entry.name, flat[entry.start : entry.stop].view(entry.parameter.shape) if next(is_used) else None
        )


def flatten_parameters(bucket: BucketLayout) -> Tensor:
    """A flat tensor of the values of a bucket's parameters, which become views of it. Their shapes, names and
    identity stay."""
    flat = separate([bucket.extent])[0]
    for entry in bucket.entries:
        view = flat[entry.start : entry.stop].view(entry.parameter.shape)
        view.copy_(entry.parameter.data)
        entry.parameter.data = view
    return flat

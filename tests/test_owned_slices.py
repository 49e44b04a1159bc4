"""Which elements each owner has of buckets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshloom.comm.windows import Extent
from meshloom.exchange.buckets.buckets import BucketEntry, entries_of, extent_of
from meshloom.exchange.slices import OwnedSlices


@dataclass
class Layout:
    """A bucket without memory."""

    number: int
    entries: list[BucketEntry]
    length: int
    extent: Extent


def layout_of(number: int, sizes: list[int], num_owners: int) -> Layout:
    named = [(f"p{number}.{index}", nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]
    entries = entries_of(named)
    return Layout(number, entries, sum(sizes), extent_of(entries, num_owners))


@given(
    sizes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    num_owners=st.integers(1, 5),
)
@pytest.mark.long
def test_each_element_has_one_owner_and_so_has_what_has_none(sizes: list[list[int]], num_owners: int):
    buckets = [layout_of(index, each, num_owners) for index, each in enumerate(sizes)]
    owned = [OwnedSlices(buckets, owner, num_owners) for owner in range(num_owners)]
    all_slices = [each for of in owned for each in of.slices]
    for bucket in buckets:
        for entry in bucket.entries:
            of = [(each.start, each.stop) for each in all_slices if each.name == entry.name]
            size = entry.parameter.numel()
            assert sorted(element for start, stop in of for element in range(start, stop)) == [*range(size)]
            assert len(of) == 1 or size > 0
    none = OwnedSlices(buckets, num_owners, num_owners)
    assert not none.slices
    shares = [torch.zeros(bucket.extent.num_elements // num_owners) for bucket in buckets]
    num_entries = sum(map(len, sizes))
    for of in owned:
        gradients = of.gradients(shares, [True] * num_entries)
        assert [each.numel() for each in gradients if each is not None] == [
            each.stop - each.start for each in of.slices
        ]

"""Counting does not change what an operation does, and counts the payload that a rank hands in."""

from __future__ import annotations

from functools import partial

import torch

from meshloom.comm.recording import Count, RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns


def test_every_operation_is_counted_with_the_payload_handed_in():
    def everything(group: RecordedGroup):
        two, four = torch.ones(2), torch.ones(4)
        source = group.rank == 0
        for start in (
            lambda: group.all_reduce(four),
            lambda: group.all_reduce(two, "max"),
            lambda: group.reduce_scatter(two, four),
            lambda: group.all_gather(four, two),
            lambda: group.all_to_all(four.clone(), four, [2, 2], [2, 2]),
            lambda: group.gather([two.clone(), two.clone()] if source else None, two, 0),
            lambda: group.broadcast(four, 0),
            lambda: group.send(two, 1) if source else group.recv(two, 0),
            group.barrier,
        ):
            work = start()
            work.wait()
        return {name: (count.calls, count.bytes) for name, count in group.counts.items()}

    source, other = in_turns(
        [partial(everything, RecordedGroup(group, "dp")) for group in simulated_groups(2)]
    )
    common = {
        "all_reduce": (2, 24),
        "reduce_scatter": (1, 16),
        "all_gather": (1, 8),
        "all_to_all": (1, 16),
        "gather": (1, 8),
        "broadcast": (1, 16),
        "barrier": (1, 0),
    }
    assert source == {**common, "send": (1, 8)}
    assert other == {**common, "recv": (1, 0)}


def test_recorded_results_equal_unrecorded_ones():
    def reduce(group):
        tensor = torch.arange(5.0) * (group.rank + 1)
        work = group.all_reduce(tensor, "avg")
        work.wait()
        return tensor

    plain = in_turns([partial(reduce, group) for group in simulated_groups(3)])
    recorded = in_turns([partial(reduce, RecordedGroup(group, "dp")) for group in simulated_groups(3)])
    assert all(torch.equal(here, there) for here, there in zip(plain, recorded, strict=True))


def test_counts_add():
    assert Count(3, 12, 1.5) + Count(1, 4, 0.5) == Count(4, 16, 2.0)


def test_seconds_cover_start_and_wait():
    group = RecordedGroup(simulated_groups(1)[0], "dp")
    work = group.all_reduce(torch.ones(3))
    started = group.counts["all_reduce"].seconds
    work.wait()
    assert 0 < started < group.counts["all_reduce"].seconds
    assert (group.rank, group.size, group.axis) == (0, 1, "dp")

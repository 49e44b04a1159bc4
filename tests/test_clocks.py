"""Offsets of clocks are found within the error that is said."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from processes import on_ranks

from meshloom.comm.network.clocks import clock_offsets
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.torch.c10d import C10dGroup
from meshloom.comm.turns import in_turns

AHEAD = [0.0, 250.0, -3.5, 1e-3]  # seconds, by rank


def test_clocks_that_are_apart_by_known_amounts():
    """Each look at a clock takes a random while, so that round trips are not symmetric."""
    draws = random.Random(1)
    now = [0.0]

    def clock(rank: int) -> float:
        now[0] += draws.uniform(1e-6, 1e-4)
        return now[0] + AHEAD[rank]

    groups = simulated_groups(4)
    found = in_turns(
        [partial(clock_offsets, group, clock=lambda rank=group.rank: clock(rank)) for group in groups]
    )
    assert all(each == found[0] for each in found)  # every rank knows them all
    for offset, ahead in zip(found[0], AHEAD, strict=True):
        assert abs(offset.seconds - ahead) <= offset.error_seconds
        assert offset.error_seconds <= 1e-4


def test_the_fastest_round_trip_counts():
    """One of five is slow in one direction only, and would be wrong by half of what it takes longer."""
    slow = [0.0, 0.0, 0.0, 1.0, 0.0]
    now, trips = [0.0], [0]

    def clock(rank: int) -> float:
        now[0] += 1e-6
        if rank == 1:
            now[0] += slow[trips[0] // 2]
            trips[0] += 1
        return now[0] + rank * 10.0

    found = in_turns(
        [
            partial(clock_offsets, group, 5, lambda rank=group.rank: clock(rank))
            for group in simulated_groups(2)
        ]
    )
    assert found[0][1].seconds == pytest.approx(10.0, abs=2e-6) and found[0][1].error_seconds <= 2e-6


def test_ranks_of_one_process_share_a_clock():
    for offset in in_turns([partial(clock_offsets, group) for group in simulated_groups(3)])[0]:
        assert offset.seconds == 0.0 and offset.error_seconds < 0.1


def test_a_rank_alone():
    offsets = in_turns([partial(clock_offsets, group) for group in simulated_groups(1)])[0]
    assert [(each.seconds, each.error_seconds) for each in offsets] == [(0.0, 0.0)]


@pytest.mark.processes
def test_processes_of_one_host_share_a_clock():
    for offsets in on_ranks(_offsets, 2):
        assert [offset for offset, _ in offsets] == [0.0, 0.0]
        assert offsets[1][1] < 0.1  # what is said of it; a busy machine takes milliseconds to answer


def _offsets() -> list[tuple[float, float]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    process_group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    assert isinstance(process_group, dist.ProcessGroup)
    group = C10dGroup(process_group, [f"rank {rank}" for rank in range(dist.get_world_size())])
    found = clock_offsets(group)
    return [(each.seconds, each.error_seconds) for each in found]

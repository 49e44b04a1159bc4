"""Messages of a pipeline match in any schedule, also where each is only handed over when both sides are
there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.runtime.point_to_point import Edge, StageMessage, Step, steps_of
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Schedule

Posted = list[tuple[StageMessage, bool]]


@pytest.mark.long
@given(
    name=st.sampled_from(list(SCHEDULES)),
    p=st.integers(1, 4),
    m=st.integers(1, 9),
    ahead=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_all_ranks_reach_the_end_when_messages_are_handed_over_hand_to_hand(
    name: str, p: int, m: int, ahead: int, data: st.DataObject
):
    schedule = make_schedule(name, p, m)
    chain = [Edge(*pair, back=True) for pair in pairwise(range(schedule.num_stages))]
    skips = [
        Edge(source, end, back=data.draw(st.booleans()))
        for source in range(schedule.num_stages)
        for end in range(source + 2, schedule.num_stages)
    ]
    steps = steps_of(schedule, [*chain, *(each for each in skips if data.draw(st.booleans()))], ahead=ahead)
    assert hand_over(schedule, steps) == [len(each) for each in steps]


@given(
    name=st.sampled_from(list(SCHEDULES)), p=st.integers(2, 4), m=st.integers(1, 9), ahead=st.integers(0, 3)
)
@settings(max_examples=50, deadline=None)
@pytest.mark.long
def test_open_receives_change_no_order_and_are_no_more_than_said(name: str, p: int, m: int, ahead: int):
    schedule = make_schedule(name, p, m)
    chain = [Edge(*pair, back=True) for pair in pairwise(range(schedule.num_stages))]
    late, early = steps_of(schedule, chain, ahead=0), steps_of(schedule, chain, ahead=ahead)
    for rank in range(p):
        assert posted(schedule, rank, early[rank]) == posted(schedule, rank, late[rank])
        assert most_open(schedule, rank, early[rank]) <= max(ahead, most_open(schedule, rank, late[rank]))


def posted(schedule: Schedule, rank: int, steps: tuple[Step, ...]) -> dict[int, Posted]:
    """Peer -> what a rank starts with it, in order."""
    found: dict[int, Posted] = {}
    for step in steps:
        for message, is_send in [*((each, False) for each in step.receives), *step.posts]:
            found.setdefault(_peer(schedule, message, is_send), []).append((message, is_send))
    return found


def most_open(schedule: Schedule, rank: int, steps: tuple[Step, ...]) -> int:
    """Most receives from a peer that are started and not needed by the action that comes next."""
    now = dict.fromkeys(range(schedule.num_ranks), 0)
    most = 0
    for step in steps:
        for message, is_send in [
            *((each, False) for each in step.receives),
            *((each, None) for each in step.awaits),
            *step.posts,
        ]:
            if is_send is not True:
                now[schedule.ranks[message.source]] += 1 if is_send is False else -1
        most = max(most, *now.values())
    return most


def hand_over(schedule: Schedule, steps: tuple[tuple[Step, ...], ...]) -> list[int]:
    """How many steps every rank gets through. A pair's oldest operations of both sides are done together; an
    action waits for what it needs."""
    open_: dict[tuple[int, int], Posted] = {}  # (rank, peer) -> started and not done
    done: set[StageMessage] = set()
    at = [0] * schedule.num_ranks
    waiting = [False] * schedule.num_ranks

    def post(rank: int, message: StageMessage, is_send: bool) -> None:
        peer = _peer(schedule, message, is_send)
        mine, theirs = open_.setdefault((rank, peer), []), open_.setdefault((peer, rank), [])
        mine.append((message, is_send))
        while mine and theirs and mine[0][0] == theirs[0][0]:
            assert mine[0][1] != theirs[0][1]
            done.add(mine.pop(0)[0])
            theirs.pop(0)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(steps):
            while at[rank] < len(row):
                step = row[at[rank]]
                if not waiting[rank]:
                    for message in step.receives:
                        post(rank, message, False)
                    waiting[rank] = True
                if not all(message in done for message in step.awaits):
                    break
                for message, is_send in step.posts:
                    post(rank, message, is_send)
                waiting[rank] = False
                at[rank] += 1
                moved = True
    assert not any(left for left in open_.values()) or at != [len(row) for row in steps]
    return at


def _peer(schedule: Schedule, message: StageMessage, is_send: bool) -> int:
    return schedule.ranks[message.destination if is_send else message.source]

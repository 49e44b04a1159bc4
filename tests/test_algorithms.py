"""Sums on a ring of messages are what one process computes, the same bits on all ranks, with the messages that the formula
counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hosts_worlds import Call, run_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_groups import on_threads, threaded_groups

import meshloom.comm.collectives.ring_group
from meshloom.comm.chunked_moves import in_chunks
from meshloom.comm.collectives.ring import all_reduce, reduce_scatter
from meshloom.comm.collectives.ring_group import ring_group
from meshloom.comm.moves import Move
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import CollectiveError, PeerLostError
from meshloom.machine.all_reduce_costs import ring_seconds

ON_RING = ["all_reduce", "reduce_scatter", "all_gather"]
ALL = [*ON_RING, "broadcast", "barrier", "send", "gather", "scatter", "all_to_all"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
OPS = ["sum", "avg", "max", "min"]


@st.composite
def _calls(draw: st.DrawFn, size: int, names: Sequence[str]) -> list[Call]:
    count = st.integers(0, 20) | st.just(300)
    call = st.builds(
        Call,
        st.sampled_from(names),
        count,
        st.sampled_from(DTYPES),
        st.sampled_from(OPS),
        st.integers(0, size - 1),
    )
    return draw(st.lists(call, min_size=1, max_size=4))


@pytest.mark.long
@given(size=st.integers(1, 8), chunk_bytes=st.sampled_from([1, 28, 64, 4096]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_simulated_ranks_compute_what_one_process_does(size: int, chunk_bytes: int, data: st.DataObject):
    calls = data.draw(_calls(size, ALL))
    groups = [ring_group(group, chunk_bytes=chunk_bytes) for group in simulated_groups(size)]
    started = [[call.start(group) for call in calls] for group in groups]  # all under way at once
    for rank, mine in enumerate(started):
        for call, (works, result) in zip(calls, mine, strict=True):
            for work in works:
                work.wait()
                assert work.is_finished()
            assert torch.equal(result, call.expected(rank, size)), (rank, call)


@contextmanager
def _in_threads(size: int):
    """Ranks that are threads, so that each group has a thread of its own behind it, as in processes."""
    groups = [ring_group(group, chunk_bytes=40) for group in threaded_groups(size)]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


@pytest.mark.long
@given(size=st.integers(1, 6), seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_sequence_of_operations_in_the_background_equals_one_process(
    size: int, seed: int, data: st.DataObject
):
    calls = data.draw(_calls(size, ALL))
    with _in_threads(size) as groups:
        results = on_threads(
            [lambda group=group: run_calls(group, calls, seed + group.rank) for group in groups]
        )
    for rank, mine in enumerate(results):
        for call, result in zip(calls, mine, strict=True):
            assert torch.equal(result, call.expected(rank, size)), (rank, call)


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.every
def test_sums_have_the_same_bits_on_all_ranks(size: int, op: Any):
    given = [torch.randn(1009, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    tensors = [each.clone() for each in given]
    groups = [ring_group(group, chunk_bytes=256) for group in simulated_groups(size)]
    for work in [group.all_reduce(tensor, op) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert all(torch.equal(tensors[0], other) for other in tensors)
    total = torch.stack(given).double().sum(0) / (size if op == "avg" else 1)
    # sum order differs: up to 8 ranks
    torch.testing.assert_close(tensors[0].double(), total, rtol=1e-6, atol=4e-6)


@pytest.mark.long
def test_it_goes_on_while_nobody_waits():
    with _in_threads(3) as groups:
        tensors = [torch.arange(100.0) for _ in groups]
        works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        deadline = time.monotonic() + 20
        while not all(work.is_finished() for work in works):
            assert time.monotonic() < deadline
        assert all(torch.equal(tensor, torch.arange(100.0) * 3) for tensor in tensors)
        for work in works:
            work.wait()


def _priced(moves: Sequence[Move]) -> tuple[int, int]:
    """What a rank sends: messages and elements."""
    sent = [move.stop - move.start for move in moves if move.kind == "send"]
    return len(sent), sum(sent)


@pytest.mark.parametrize("size", range(2, 9))
def test_a_ring_sends_what_its_formula_says(size: int):
    n = 840  # which every size divides
    for rank in range(size):
        messages, elements = _priced(all_reduce(rank, size, n, mean=True))
        assert messages * 0.5 + elements / 10 == pytest.approx(ring_seconds(n, size, 0.5, 10.0))


@pytest.mark.parametrize("size", range(2, 9))
def test_the_longest_chain_of_messages_takes_what_the_formula_says(size: int):
    """Followed on a clock: a message begins when its sender has all it needs and both ends are free; an end
    sends one at a time, and receives one."""
    n, latency, rate = 840, 0.5, 10.0
    finish = _clocked([all_reduce(rank, size, n, mean=False) for rank in range(size)], latency, rate)
    assert finish == pytest.approx(ring_seconds(n, size, latency, rate))


def _clocked(ranks: Sequence[Sequence[Move]], latency: float, rate: float) -> float:
    """When the last rank is done, each doing its moves in order; a send does not keep its rank from going on,
    as both directions are free."""
    now, at = [0.0] * len(ranks), [0] * len(ranks)
    sending, receiving = [0.0] * len(ranks), [0.0] * len(ranks)
    mail: dict[tuple[int, int], list[float]] = {}
    while any(index < len(moves) for index, moves in zip(at, ranks, strict=True)):
        possible: list[tuple[float, int]] = []
        for rank, moves in enumerate(ranks):
            if at[rank] < len(moves):
                move = moves[at[rank]]
                if move.kind == "send":
                    possible.append((max(now[rank], sending[rank], receiving[move.peer]), rank))
                elif mail.get((move.peer, rank)):
                    possible.append((max(now[rank], mail[move.peer, rank][0]), rank))
        time, rank = min(possible)
        move = ranks[rank][at[rank]]
        if move.kind == "send":
            sending[rank] = receiving[move.peer] = time + latency + (move.stop - move.start) / rate
            mail.setdefault((rank, move.peer), []).append(sending[rank])
        else:
            mail[move.peer, rank].pop(0)
            now[rank] = time
        at[rank] += 1
    return max(*now, *sending)


@pytest.mark.parametrize("size", range(2, 9))
def test_every_message_is_expected_in_the_same_order_and_size(size: int):
    """And the lists are the same in chunks: what one rank sends to another is what that one receives from it,
    one by one."""
    for chunk in (37, 4):
        lists = [in_chunks(all_reduce(rank, size, 37, mean=True), chunk) for rank in range(size)]
        for one in range(size):
            for other in range(size):
                sent = [
                    (move.start, move.stop)
                    for move in lists[one]
                    if move.kind == "send" and move.peer == other
                ]
                assert sent == [
                    (move.start, move.stop)
                    for move in lists[other]
                    if move.kind in ("add", "receive") and move.peer == one
                ]


def test_a_chunk_goes_on_before_the_next_one_is_there():
    texts = [str(move) for move in in_chunks(all_reduce(0, 3, 12, mean=True), 2)]
    assert texts == [
        "send [8:10] to 1", "send [10:12] to 1", "add [4:6] from 2", "send [4:6] to 1", "add [6:8] from 2", "send [6:8] to 1",
        "add [0:2] from 2", "divide [0:2]", "send [0:2] to 1", "add [2:4] from 2", "divide [2:4]", "send [2:4] to 1",
        "receive [8:10] from 2", "send [8:10] to 1", "receive [10:12] from 2", "send [10:12] to 1", "receive [4:6] from 2", "receive [6:8] from 2",
    ]  # fmt: skip


def test_what_is_sent_is_counted():
    groups = [ring_group(group) for group in simulated_groups(4)]
    for work in [group.all_reduce(torch.ones(100)) for group in groups]:
        work.wait()
    # 2 (N-1) messages, 2 (N-1)/N of 400 bytes
    assert {(group.sent_messages, group.sent_bytes) for group in groups} == {(6, 600)}


def _largest_error(size: int, op: Any, count: int = 50) -> float:
    groups = [ring_group(group, chunk_bytes=40) for group in simulated_groups(size)]
    call = Call("all_reduce", count, torch.float64, op)
    started = [call.start(group) for group in groups]
    for works, _ in started:
        works[0].wait()
    return max(
        float((result - call.expected(rank, size)).abs().max()) for rank, (_, result) in enumerate(started)
    )


def _wrong_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece that a rank sends and the one that it adds are taken for others, on all ranks alike."""

    def shifted(rank: int, offsets: Sequence[int]) -> list[Move]:
        n, size = offsets[-1], offsets[1] - offsets[0]
        moves = reduce_scatter(rank, offsets)
        return [
            *moves[:-2],
            *(
                replace(
                    move, start=(move.start + size) % n, stop=(move.start + size) % n + move.stop - move.start
                )
                for move in moves[-2:]
            ),
        ]

    monkeypatch.setattr("meshloom.comm.collectives.ring.reduce_scatter", shifted)


def _skipped_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of what is added is never sent, and nobody misses it."""
    original = in_chunks

    def shorter(moves: Sequence[Move], chunk: int) -> list[Move]:
        return original([replace(move, stop=max(move.start, move.stop - 5)) for move in moves], chunk)

    monkeypatch.setattr(meshloom.comm.collectives.ring_group, "in_chunks", shorter)


def _not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "meshloom.comm.collectives.ring.all_reduce",
        lambda rank, size, n, mean: all_reduce(rank, size, n, mean=False),
    )


@pytest.mark.parametrize("plant", [_wrong_piece, _skipped_chunk, _not_divided])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]):
    """What these tests compare with notices mistakes that all ranks make together."""
    assert _largest_error(5, "avg") == pytest.approx(0, abs=1e-12)  # one rounding of the division
    plant(monkeypatch)
    assert _largest_error(5, "avg") > 0.1


def test_nothing_else_may_come_in_between():
    """Messages of the user's own keep their place among those of a collective between the same two ranks."""
    groups = [ring_group(group, chunk_bytes=8) for group in simulated_groups(2)]
    sums, letter, arrived = [torch.ones(10) for _ in groups], torch.full((3,), 7.0), torch.zeros(3)
    works = [
        groups[0].all_reduce(sums[0]),
        groups[0].send(letter, 1),
        groups[1].all_reduce(sums[1]),
        groups[1].recv(arrived, 0),
    ]
    works += [group.all_reduce(each) for group, each in zip(groups, sums, strict=True)]
    for work in works:
        work.wait()
    assert torch.equal(arrived, letter) and torch.equal(sums[1], torch.full((10,), 4.0))


def test_a_rank_that_does_not_come_is_waited_for_with_an_error():
    groups = [ring_group(group) for group in simulated_groups(2)]
    with pytest.raises(
        CollectiveError, match=r"all_reduce of 12 B on rank 0 waits for messages that will not come\."
    ):
        groups[0].all_reduce(torch.ones(3)).wait()


def test_after_an_abort_nothing_can_be_started():
    with _in_threads(2) as groups:
        groups[0].abort()
        with pytest.raises(
            PeerLostError, match=r"rank 0 has aborted its group: all_reduce of 8 B cannot run\."
        ):
            groups[0].all_reduce(torch.ones(2))


@pytest.mark.long
def test_who_waits_looks_for_a_rank_that_left():
    group = ring_group(threaded_groups(2)[0], name="rank 0 (dp=0)", who_left=lambda: "rank 1 (dp=1)")
    with pytest.raises(
        PeerLostError,
        match=r"rank 0 \(dp=0\) lost rank 1 \(dp=1\), which has aborted, in all_reduce of 8 B\.",
    ):
        group.all_reduce(torch.ones(2)).wait()
    group.abort()
    group.close()


def test_messages_without_bytes_are_refused():
    with pytest.raises(CollectiveError, match=r"chunk_bytes=0 must be 1 or more\."):
        ring_group(simulated_groups(2)[0], chunk_bytes=0)


def test_what_has_no_order_cannot_be_the_largest():
    group = ring_group(simulated_groups(1)[0])
    with pytest.raises(
        CollectiveError, match=r"complex64 cannot be reduced by max on a ring\. Use exchange=all_reduce\."
    ):
        group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    group.all_reduce(torch.ones(2, dtype=torch.complex64)).wait()

"""An all-reduce that is spelled out gives what one process computes, the same bits on all ranks, with the
messages that the formulas count."""

from __future__ import annotations

import time
from collections import Counter
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

import meshloom.comm.collectives.explicit
from meshloom.comm.chunked_moves import in_chunks
from meshloom.comm.collectives.explicit import ExplicitGroup, explicit_group
from meshloom.comm.collectives.halving import halving
from meshloom.comm.collectives.hierarchical import hierarchical
from meshloom.comm.collectives.ring import reduce_scatter, ring
from meshloom.comm.collectives.tree import tree
from meshloom.comm.moves import AllReduceMoves, Move
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import CollectiveError, MachineError, PeerLostError
from meshloom.machine.all_reduce_costs import (
    ALGORITHMS,
    choose_algorithm,
    halving_seconds,
    ring_seconds,
    tree_seconds,
)

SPELLED_OUT = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
ALL = [*SPELLED_OUT, "barrier", "send", "gather", "scatter", "all_to_all"]
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
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    size=st.integers(1, 8),
    chunk_bytes=st.sampled_from([1, 28, 64, 4096]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_simulated_ranks_compute_what_one_process_does(
    algorithm: str, size: int, chunk_bytes: int, data: st.DataObject
):
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    calls = data.draw(_calls(size, ALL))
    groups = [
        explicit_group(group, algorithm, hosts=hosts, chunk_bytes=chunk_bytes)
        for group in simulated_groups(size)
    ]
    started = [[call.start(group) for call in calls] for group in groups]  # all under way at once
    for rank, mine in enumerate(started):
        for call, (works, result) in zip(calls, mine, strict=True):
            for work in works:
                work.wait()
                assert work.is_finished()
            assert torch.equal(result, call.expected(rank, size)), (rank, call)


@contextmanager
def _in_threads(algorithm: str, size: int, hosts: Sequence[int] | None = None):
    """Ranks that are threads, so that each group has a thread of its own behind it, as in processes."""
    groups = [
        explicit_group(group, algorithm, hosts=hosts, chunk_bytes=40) for group in threaded_groups(size)
    ]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


@pytest.mark.long
@given(
    algorithm=st.sampled_from(ALGORITHMS), size=st.integers(1, 6), seed=st.integers(0, 1000), data=st.data()
)
@settings(max_examples=15, deadline=None)
def test_any_sequence_of_operations_in_the_background_equals_one_process(
    algorithm: str, size: int, seed: int, data: st.DataObject
):
    calls = data.draw(_calls(size, ALL))
    with _in_threads(algorithm, size, [rank // 2 for rank in range(size)]) as groups:
        results = on_threads(
            [lambda group=group: run_calls(group, calls, seed + group.rank) for group in groups]
        )
    for rank, mine in enumerate(results):
        for call, result in zip(calls, mine, strict=True):
            assert torch.equal(result, call.expected(rank, size)), (rank, call)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.every
def test_sums_have_the_same_bits_on_all_ranks(algorithm: str, size: int, op: Any):
    given = [torch.randn(1009, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    tensors = [each.clone() for each in given]
    groups = [
        explicit_group(group, algorithm, hosts=[0] + [1] * (size - 1), chunk_bytes=256)
        for group in simulated_groups(size)
    ]
    for work in [group.all_reduce(tensor, op) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert all(torch.equal(tensors[0], other) for other in tensors)
    total = torch.stack(given).double().sum(0) / (size if op == "avg" else 1)
    # sum order differs: up to 8 ranks
    torch.testing.assert_close(tensors[0].double(), total, rtol=1e-6, atol=4e-6)


@pytest.mark.long
def test_it_goes_on_while_nobody_waits():
    with _in_threads("ring", 3) as groups:
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
        messages, elements = _priced(ring(rank, size, n).moves(mean=True))
        assert messages * 0.5 + elements / 10 == pytest.approx(ring_seconds(n, size, 0.5, 10.0))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_halving_sends_what_its_formula_says(size: int):
    for rank in range(size):
        messages, elements = _priced(halving(rank, size, 840).moves(mean=False))
        assert messages * 0.5 + elements / 10 == pytest.approx(halving_seconds(840, size, 0.5, 10.0))


@pytest.mark.parametrize(("algorithm", "seconds"), [(halving, halving_seconds), (tree, tree_seconds)])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_the_longest_chain_of_messages_takes_what_the_formula_says(algorithm: Any, seconds: Any, size: int):
    """Followed on a clock: a message begins when its sender has all it needs and both ends are free; an end
    sends one at a time, and receives one."""
    n, latency, rate = 840, 0.5, 10.0
    finish = _clocked([algorithm(rank, size, n).moves(mean=False) for rank in range(size)], latency, rate)
    # Of 5 ranks one pair is folded, and a partner of its that is not sends early, which holds up the folding.
    assert finish == pytest.approx(
        seconds(n, size, latency, rate), rel=0.08 if (algorithm, size) == (halving, 5) else 1e-9
    )


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


def test_hosts_are_crossed_with_a_share_of_the_elements():
    hosts = [0, 0, 1, 1]
    across = Counter[int]()
    for rank in range(4):
        for move in hierarchical(rank, hosts, 80).moves(mean=False):
            if move.kind == "send" and hosts[move.peer] != hosts[rank]:
                across[rank] += move.stop - move.start
    assert across == dict.fromkeys(range(4), 40)  # 2 (H-1)/H of its half


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_message_is_expected_in_the_same_order_and_size(algorithm: str, size: int):
    """And the lists are the same in chunks: what one rank sends to another is what that one receives from it,
    one by one."""
    made: Callable[[int], AllReduceMoves] = {
        "ring": lambda rank: ring(rank, size, 37),
        "tree": lambda rank: tree(rank, size, 37),
        "halving": lambda rank: halving(rank, size, 37),
        "hierarchical": lambda rank: hierarchical(rank, [other % 3 for other in range(size)], 37),
    }[algorithm]
    for chunk in (37, 4):
        lists = [in_chunks(made(rank).moves(mean=True), chunk) for rank in range(size)]
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
    texts = [str(move) for move in in_chunks(ring(0, 3, 12).moves(mean=True), 2)]
    assert texts == [
        "send [8:10] to 1", "send [10:12] to 1", "add [4:6] from 2", "send [4:6] to 1", "add [6:8] from 2", "send [6:8] to 1",
        "add [0:2] from 2", "divide [0:2]", "send [0:2] to 1", "add [2:4] from 2", "divide [2:4]", "send [2:4] to 1",
        "receive [8:10] from 2", "send [8:10] to 1", "receive [10:12] from 2", "send [10:12] to 1", "receive [4:6] from 2", "receive [6:8] from 2",
    ]  # fmt: skip


def test_what_is_sent_is_counted():
    groups = [explicit_group(group, "ring") for group in simulated_groups(4)]
    for work in [group.all_reduce(torch.ones(100)) for group in groups]:
        work.wait()
    # 2 (N-1) messages, 2 (N-1)/N of 400 bytes
    assert {(group.sent_messages, group.sent_bytes) for group in groups} == {(6, 600)}


def _largest_error(size: int, algorithm: str, op: Any, count: int = 50) -> float:
    groups = [explicit_group(group, algorithm, chunk_bytes=40) for group in simulated_groups(size)]
    call = Call("all_reduce", count, torch.float64, op)
    started = [call.start(group) for group in groups]
    for works, _ in started:
        works[0].wait()
    return max(
        float((result - call.expected(rank, size)).abs().max()) for rank, (_, result) in enumerate(started)
    )


def _wrong_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece that a rank sends and the one that it adds are taken for others, on all ranks alike."""

    def shifted(place: int, ranks: Sequence[int], offsets: Sequence[int]) -> list[Move]:
        n, size = offsets[-1], offsets[1] - offsets[0]
        moves = reduce_scatter(place, ranks, offsets)
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

    monkeypatch.setattr(meshloom.comm.collectives.explicit, "in_chunks", shorter)


def _not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AllReduceMoves.moves
    monkeypatch.setattr(AllReduceMoves, "moves", lambda self, mean: original(self, mean=False))


@pytest.mark.parametrize("plant", [_wrong_piece, _skipped_chunk, _not_divided])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]):
    """What these tests compare with notices mistakes that all ranks make together."""
    assert _largest_error(5, "ring", "avg") == pytest.approx(0, abs=1e-12)  # one rounding of the division
    plant(monkeypatch)
    assert _largest_error(5, "ring", "avg") > 0.1


def test_nothing_else_may_come_in_between():
    """Messages of the user's own keep their place among those of a collective between the same two ranks."""
    groups = [explicit_group(group, "ring", chunk_bytes=8) for group in simulated_groups(2)]
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
    groups = [explicit_group(group, "tree") for group in simulated_groups(2)]
    with pytest.raises(
        CollectiveError, match=r"all_reduce of 12 B on rank 0 waits for messages that will not come\."
    ):
        groups[0].all_reduce(torch.ones(3)).wait()


def test_after_an_abort_nothing_can_be_started():
    with _in_threads("ring", 2) as groups:
        groups[0].abort()
        with pytest.raises(
            PeerLostError, match=r"rank 0 has aborted its group: all_reduce of 8 B cannot run\."
        ):
            groups[0].all_reduce(torch.ones(2))


@pytest.mark.long
def test_who_waits_looks_for_a_rank_that_left():
    group = explicit_group(
        threaded_groups(2)[0], "ring", name="rank 0 (dp=0)", who_left=lambda: "rank 1 (dp=1)"
    )
    with pytest.raises(
        PeerLostError,
        match=r"rank 0 \(dp=0\) lost rank 1 \(dp=1\), which has aborted, in all_reduce of 8 B\.",
    ):
        group.all_reduce(torch.ones(2)).wait()
    group.abort()
    group.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"algorithm": "star"},
            r"An all-reduce by 'star' is not known\. Use ring, tree, halving, hierarchical\.",
        ),
        (
            {"algorithm": "ring", "hosts": [0]},
            r"hosts=\[0\] are of 1 ranks, and the group has 2\. Give the host of each rank\.",
        ),
        ({"algorithm": "ring", "chunk_bytes": 0}, r"chunk_bytes=0 must be 1 or more\."),
    ],
)
def test_what_cannot_be_spelled_out_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(CollectiveError, match=words):
        explicit_group(simulated_groups(2)[0], **settings)


def test_what_has_no_order_cannot_be_the_largest():
    group: ExplicitGroup = explicit_group(simulated_groups(1)[0], "ring")
    with pytest.raises(
        CollectiveError, match=r"complex64 cannot be reduced by max with ring\. Use exchange=all_reduce\."
    ):
        group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    group.all_reduce(torch.ones(2, dtype=torch.complex64)).wait()


def test_the_choice_says_why():
    fast_inside = choose_algorithm(
        25 << 20,
        16,
        4,
        1e-4,
        25e6,
        inside_latency_seconds=1e-6,
        inside_bytes_per_second=1e10,
        own_seconds=1.61,
    )
    assert fast_inside.reason.startswith(
        "hierarchical: 25 MiB over 16 ranks, 1.58 s against 1.61 s (all_reduce), "
    )
    assert choose_algorithm(4096, 4, 4, 1e-3, 25e6).algorithm == "halving"
    assert choose_algorithm(25 << 20, 7, 7, 1e-4, 25e6).algorithm == "ring"
    with pytest.raises(MachineError, match="5 ranks cannot be equally many on each of 2 hosts"):
        choose_algorithm(1, 5, 2, 1e-3, 1e6)

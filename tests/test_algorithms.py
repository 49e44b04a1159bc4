"""Sums on a ring of messages are what one process computes, the same bits on all ranks, with the messages that the formula
counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hosts_worlds import Call, run_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_groups import on_threads, threaded_groups

from meshloom.comm.background import Patience
from meshloom.comm.collectives.ring import CHUNK_BYTES, RingGroup, ring_group
from meshloom.comm.group import Group, Work
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import SimulatedGroup, simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CollectiveError, PeerLostError
from meshloom.machine.all_reduce_costs import ring_seconds

ON_RING = ["all_reduce", "reduce_scatter", "all_gather"]
ALL = [*ON_RING, "broadcast", "barrier", "send", "gather", "all_to_all"]
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

    def rank(group: RingGroup) -> None:
        started = [call.start(group) for call in calls]  # all under way at once
        for call, (works, result) in zip(calls, started, strict=True):
            for work in works:
                work.wait()
                assert work.is_finished()
            assert torch.equal(result, call.expected(group.rank, size)), (group.rank, call)

    in_turns([partial(rank, group) for group in _simulated(size, chunk_bytes)])


def _simulated(size: int, chunk_bytes: int = CHUNK_BYTES) -> list[RingGroup]:
    return [ring_group(group, chunk_bytes=chunk_bytes) for group in simulated_groups(size)]


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
    groups = _simulated(size, 256)
    in_turns(
        [lambda i=i: groups[i].all_reduce(tensors[i], op).wait() for i in range(size)]  # pyright: ignore[reportUnknownLambdaType]
    )
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


@pytest.mark.parametrize("size", range(2, 9))
def test_a_ring_sends_what_its_formula_says(size: int):
    n = 840  # which every size divides
    sending = _on_a_ring(size, lambda group: group.all_reduce(torch.ones(n), "avg"))
    for counts in sending:
        elements = counts["send"].bytes / 4
        assert counts["send"].calls * 0.5 + elements / 10 == pytest.approx(ring_seconds(n, size, 0.5, 10.0))


def test_a_chunk_goes_on_before_the_next_one_is_there():
    """Three ranks, pieces of two chunks: what is sent after an arrival is what has arrived."""
    assert _on_a_ring(3, lambda group: group.all_reduce(torch.ones(12), "avg"), chunk_bytes=8)[0].order == [
        "send", "send", *["arrived", "send"] * 6, "arrived", "arrived",
    ]  # fmt: skip


class _Counts(dict[str, Any]):
    order: list[str]


def _on_a_ring(size: int, start: Callable[[Any], Work], chunk_bytes: int = CHUNK_BYTES) -> list[_Counts]:
    """What each rank's messages count, and their order."""

    def rank(group: SimulatedGroup) -> _Counts:
        recorded = _Noting(group)
        on_ring = RingGroup(group, chunk_bytes, Patience("", lambda: None))
        on_ring.group = recorded
        start(on_ring).wait()
        found = _Counts(recorded.counts)
        found.order = recorded.order
        return found

    return in_turns([partial(rank, group) for group in simulated_groups(size)])


class _Noting(RecordedGroup):
    def __init__(self, group: Group) -> None:
        super().__init__(group, "dp")
        self.order: list[str] = []

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        self.order.append("send")
        return super().send(tensor, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        return _Arriving(super().recv(tensor, source), self.order)


class _Arriving(Work):
    def __init__(self, work: Work, order: list[str]) -> None:
        self._work, self._order = work, order

    def wait(self) -> None:
        self._work.wait()
        self._order.append("arrived")

    def is_finished(self) -> bool:
        return self._work.is_finished()


def _largest_error(size: int, op: Any, count: int = 50) -> float:
    call = Call("all_reduce", count, torch.float64, op)

    def rank(group: RingGroup) -> float:
        works, result = call.start(group)
        works[0].wait()
        return float((result - call.expected(group.rank, size)).abs().max())

    return max(in_turns([partial(rank, group) for group in _simulated(size, 40)]))


def _wrong_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step a rank sends and adds another piece than the one that is due, on all ranks alike."""
    chunks: Any = vars(RingGroup)["_chunks"]
    monkeypatch.setattr(
        RingGroup,
        "_chunks",
        lambda self, flat, step: chunks(self, flat, step + 1 if step == self.size - 2 else step),
    )


def _skipped_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of a piece is never sent, and nobody misses it."""
    chunks: Any = vars(RingGroup)["_chunks"]
    monkeypatch.setattr(RingGroup, "_chunks", lambda self, flat, step: chunks(self, flat, step)[:-1])


def _not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshloom.comm.collectives.ring.divide", lambda total, count: None)


@pytest.mark.parametrize("plant", [_wrong_piece, _skipped_chunk, _not_divided])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]):
    """What these tests compare with notices mistakes that all ranks make together."""
    assert _largest_error(5, "avg") == pytest.approx(0, abs=1e-12)  # one rounding of the division
    plant(monkeypatch)
    assert _largest_error(5, "avg") > 0.1


def test_nothing_else_may_come_in_between():
    """Messages of the user's own keep their place among those of a collective between the same two ranks."""
    sums, letter, arrived = [torch.ones(10) for _ in range(2)], torch.full((3,), 7.0), torch.zeros(3)

    def rank(group: RingGroup) -> None:
        mine = sums[group.rank]
        works = [group.all_reduce(mine), group.recv(arrived, 0) if group.rank else group.send(letter, 1)]
        for work in [*works, group.all_reduce(mine)]:
            work.wait()

    in_turns([partial(rank, group) for group in _simulated(2, 8)])
    assert torch.equal(arrived, letter) and torch.equal(sums[1], torch.full((10,), 4.0))


def test_a_rank_that_does_not_come_is_waited_for_with_an_error():
    with pytest.raises(CollectiveError, match=r"rank 0 waits for a message that rank 1 will not send\."):
        _simulated(2)[0].all_reduce(torch.ones(3)).wait()


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


def test_what_has_no_order_cannot_be_the_largest():
    group = ring_group(simulated_groups(1)[0])
    with pytest.raises(
        CollectiveError, match=r"complex64 cannot be reduced by max on a ring\. Use exchange=all_reduce\."
    ):
        group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    group.all_reduce(torch.ones(2, dtype=torch.complex64)).wait()

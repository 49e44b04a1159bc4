"""Ranks that call different things, do not come, or have too little memory: an error on every rank that says
so, and never a wrong number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from processes import told
from warm_ranks import WarmRank, WarmRanks

from meshloom.comm.group import Work
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.core.errors import CollectiveError, MeshloomError, PeerLostError

pytestmark = pytest.mark.processes
Told = tuple[type[MeshloomError], str, float]


@pytest.fixture
def ranks() -> Iterator[WarmRanks]:
    with WarmRanks(3) as made:
        yield made


# What most ranks call, what rank 1 calls, and both in words.
MISTAKES: dict[str, tuple[Callable[[ShmGroup], Work], Callable[[ShmGroup], Work], str, str]] = {
    "shape": (
        lambda group: group.all_reduce(torch.ones(100)),
        lambda group: group.all_reduce(torch.ones(101)),
        "all_reduce sum of float32[100]",
        "all_reduce sum of float32[101]",
    ),
    "shape of the same count": (
        lambda group: group.all_reduce(torch.ones(2, 50)),
        lambda group: group.all_reduce(torch.ones(50, 2)),
        "all_reduce sum of float32[2, 50]",
        "all_reduce sum of float32[50, 2]",
    ),
    "shape of large tensors": (
        lambda group: group.all_reduce(torch.ones(3_000_000)),
        lambda group: group.all_reduce(torch.ones(3_000_001)),
        "all_reduce sum of float32[3000000]",
        "all_reduce sum of float32[3000001]",
    ),
    "dtype": (
        lambda group: group.broadcast(torch.ones(4), 0),
        lambda group: group.broadcast(torch.ones(4, dtype=torch.bfloat16), 0),
        "broadcast of float32[4] with root 0",
        "broadcast of bfloat16[4] with root 0",
    ),
    "kind": (
        lambda group: group.all_reduce(torch.ones(100)),
        lambda group: group.all_gather(torch.empty(300), torch.ones(100)),
        "all_reduce sum of float32[100]",
        "all_gather of float32[100]",
    ),
    "reduction": (
        lambda group: group.reduce_scatter(torch.empty(2), torch.ones(6), "sum"),
        lambda group: group.reduce_scatter(torch.empty(2), torch.ones(6), "max"),
        "reduce_scatter sum of float32[2]",
        "reduce_scatter max of float32[2]",
    ),
    "root": (
        lambda group: group.broadcast(torch.ones(4), 0),
        lambda group: group.broadcast(torch.ones(4), 1),
        "broadcast of float32[4] with root 0",
        "broadcast of float32[4] with root 1",
    ),
    "order": (
        lambda group: [group.barrier(), group.all_reduce(torch.ones(3), "avg")][1],
        lambda group: [group.all_reduce(torch.ones(3), "avg"), group.barrier()][1],
        "barrier",
        "all_reduce avg of float32[3]",
    ),
}


def _mistaken(warm: WarmRank, name: str) -> Told:
    usual, other, *_ = MISTAKES[name]
    group = warm.open()
    group.barrier().wait()
    work = (other if warm.rank == 1 else usual)(group)
    return told(work.wait)


def test_every_rank_names_both_calls(ranks: WarmRanks) -> None:
    for name, (_, _, usual, other) in MISTAKES.items():
        for rank, (kind, text, _) in enumerate(ranks.run(_mistaken, name)):
            own, peer, their = (
                (other, "rank 0 (dp=0)", usual) if rank == 1 else (usual, "rank 1 (dp=1)", other)
            )
            assert kind is CollectiveError, (name, text)
            assert text.startswith(f"rank {rank} (dp={rank}) called {own} where {peer} called {their}: "), (
                name,
                text,
            )


def _unlike_sizes(warm: WarmRank) -> Told | None:
    """Rank 0 expects one element more of rank 1 than it sends."""
    group = warm.open()
    expected = [2, 3, 2] if warm.rank == 0 else [2, 2, 2]
    work = group.all_to_all(torch.empty(sum(expected)), torch.ones(6), expected, [2, 2, 2])
    return told(work.wait) if warm.rank == 0 else None


def test_unlike_sizes_of_an_all_to_all_are_told(ranks: WarmRanks) -> None:
    kind, text, _ = ranks.run(_unlike_sizes)[0]
    assert kind is CollectiveError and "rank 0 (dp=0)" in text and "rank 1 (dp=1)" in text, text


def _unlike_message(warm: WarmRank) -> Told | None:
    group = warm.open()
    if warm.rank == 0:
        group.send(torch.ones(3), 1).wait()
        return None
    return told(group.recv(torch.ones(4), 0).wait) if warm.rank == 1 else None


def test_an_unlike_message_is_told_where_it_arrives(ranks: WarmRanks) -> None:
    kind, text, _ = ranks.run(_unlike_message)[1]
    assert kind is CollectiveError
    assert text.startswith(
        "recv of float32[4] from rank 0 (dp=0) on rank 1 (dp=1) met float32[3] from rank 0 (dp=0)"
    ), text


def _meaningless(warm: WarmRank) -> list[str]:
    group = warm.open()
    pair = torch.ones(2, dtype=torch.complex64)
    found = [
        told(lambda: group.all_reduce(pair, "max")),
        told(lambda: group.all_reduce(torch.ones(2), "xor")),
        told(lambda: group.all_reduce(torch.ones(2, dtype=torch.bool), "avg")),
        told(lambda: group.reduce_scatter(torch.ones(2), torch.ones(5))),
        told(lambda: group.all_gather(torch.ones(6, dtype=torch.int32), torch.ones(2))),
        told(lambda: group.all_to_all(torch.ones(2), torch.ones(2), [1, 1, 0], [1, 1, 1])),
        told(lambda: group.gather([torch.ones(2)], torch.ones(2), warm.rank)),
    ]
    group.barrier().wait()  # nothing was started
    group.close()
    found.append(told(lambda: group.all_reduce(torch.ones(2))))
    assert all(kind is CollectiveError for kind, _, _ in found)
    return [text for _, text, _ in found]


def test_calls_without_a_meaning_are_refused_where_they_are_made(ranks: WarmRanks) -> None:
    complex_max, float_xor, bool_avg, scatter, gather, sizes, outputs, closed = ranks.run(_meaningless)[1]
    assert complex_max == "Tensors of torch.complex64 cannot be reduced by max."
    assert float_xor == "Tensors of torch.float32 cannot be reduced by xor."
    assert bool_avg == "Tensors of torch.bool cannot be reduced by avg."
    assert "float32[5] is not 3 times float32[2]" in scatter
    assert "int32[6] is not 3 times float32[2]" in gather
    assert "sends [1, 1, 1] of 2 elements" in sizes
    assert "needs 3 tensors of float32[2], and was given float32[2]" in outputs
    assert closed == "rank 1 (dp=1) has closed its group: nothing can run in it."


def _one_stays_away(warm: WarmRank) -> list[Told]:
    group, other = warm.open(timeout_seconds=1.0), warm.open(timeout_seconds=1.0)
    group.broadcast(torch.ones(2), 2).wait()
    other.barrier().wait()
    if warm.rank == 1:
        return []
    return [told(group.all_reduce(torch.ones(3)).wait), told(other.recv(torch.ones(3), 1).wait)]


def test_a_rank_that_stays_away_is_named_at_the_timeout(ranks: WarmRanks) -> None:
    answers = ranks.run(_one_stays_away)
    for rank in (0, 2):
        collective, message = answers[rank]
        assert collective[0] is message[0] is PeerLostError
        assert collective[1] == (
            f"rank {rank} (dp={rank}) waited too long for rank 1 (dp=1) in all_reduce of float32[3]: longer than the timeout of 1 s. "
            "rank 1 (dp=1) has started broadcast of float32[2] with root 2 last."
        )
        assert message[1].startswith(
            f"rank {rank} (dp={rank}) waited too long for rank 1 (dp=1) in recv of float32[3] from rank 1 (dp=1): "
        )
        assert min(collective[2], message[2]) >= 1.0


def _one_does_not_open(warm: WarmRank) -> Told | None:
    return None if warm.rank == 1 else told(lambda: warm.open(timeout_seconds=1.0))


def test_a_rank_that_does_not_open_the_group_is_named(ranks: WarmRanks) -> None:
    answers = ranks.run(_one_does_not_open)
    for rank in (0, 2):
        kind, text, _ = answers[rank]
        assert kind is PeerLostError and "rank 1 (dp=1)" in text, text


def _one_aborts(warm: WarmRank) -> tuple[Told, Told]:
    group = warm.open()
    group.barrier().wait()
    if warm.rank == 1:
        work = group.all_reduce(torch.ones(3))
        group.abort()
        group.abort()
        return told(work.wait), told(group.barrier)
    receiving = group.recv(torch.ones(2), 1)
    # the second one lacks rank 1
    return told(lambda: [group.all_reduce(torch.ones(3)).wait() for _ in range(2)]), told(receiving.wait)


def test_abort_ends_operations_of_all_ranks(ranks: WarmRanks) -> None:
    for rank, answers in enumerate(ranks.run(_one_aborts)):
        for kind, text, _ in answers:
            assert kind is PeerLostError
            assert text.startswith(f"rank {rank} (dp={rank})") and ("rank 1 (dp=1)" in text), text


def _no_room(*_: object) -> None:
    raise OSError("no room")


def _too_little(warm: WarmRank) -> Told:
    group = warm.open()
    group.all_reduce(torch.ones(100_000)).wait()
    with pytest.MonkeyPatch.context() as patch:
        if warm.rank == 1:
            patch.setattr(os, "posix_fallocate", _no_room)
        found = told(lambda: group.window(6 << 20))
    group.barrier().wait()
    return found


def test_too_little_memory_is_told_on_all_ranks(ranks: WarmRanks) -> None:
    for rank, (kind, text, _) in enumerate(ranks.run(_too_little)):
        assert kind is CollectiveError
        if rank == 1:
            assert "6 MiB are needed" in text and "--transport gloo" in text, text
        else:
            assert text == "rank 1 (dp=1) has too little memory for a window of 6291456 bytes."

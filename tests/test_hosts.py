"""Groups over several hosts give what one process computes, whatever the hosts, and go on while nobody
waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hosts_worlds import Call, hosts_groups, run_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_groups import on_threads, threaded_groups
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.network.hosts import HostsGroup
from meshloom.comm.network.two_level import HostsParts
from meshloom.core.errors import CollectiveError, PeerLostError

NAMES = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "barrier",
    "send",
    "gather",
    "all_to_all",
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


@st.composite
def _hosts(draw: st.DrawFn) -> list[list[int]]:
    """Ranks of 2 to 3 hosts, 2 to 3 on each, numbered in any way."""
    num_hosts, k = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    ranks = draw(st.permutations(range(num_hosts * k))) if draw(st.booleans()) else list(range(num_hosts * k))
    return [ranks[host * k : (host + 1) * k] for host in range(num_hosts)]


@st.composite
def _calls(draw: st.DrawFn, size: int) -> list[Call]:
    count, dtype, op = (
        st.integers(0, 20) | st.just(1000),
        st.sampled_from(DTYPES),
        st.sampled_from(["sum", "avg", "max", "min"]),
    )
    call = st.builds(Call, st.sampled_from(NAMES), count, dtype, op, st.integers(0, size - 1))
    return draw(st.lists(call, min_size=1, max_size=6))


@given(hosts=_hosts(), seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.slow
def test_any_sequence_of_operations_equals_one_process(
    hosts: list[list[int]], seed: int, data: st.DataObject
):
    size = sum(map(len, hosts))
    calls = data.draw(_calls(size))
    with hosts_groups(hosts) as groups:
        results = on_threads(
            [lambda group=group: run_calls(group, calls, seed + group.rank) for group in groups]
        )
    for rank, mine in enumerate(results):
        for call, result in zip(calls, mine, strict=True):
            assert torch.equal(result, call.expected(rank, size)), (rank, call)


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[0, 1, 2], [3, 4, 5]]])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reductions_have_the_same_bits_on_all_ranks(hosts: list[list[int]], op: str):
    size = sum(map(len, hosts))
    given = [torch.randn(1009, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def run(group: Group) -> Tensor:
        tensor = torch.nn.Parameter(given[group.rank].clone())
        group.all_reduce(tensor, op).wait()  # type: ignore[arg-type]
        return tensor.detach()

    with hosts_groups(hosts) as groups:
        first, *others = on_threads([lambda group=group: run(group) for group in groups])
    assert all(torch.equal(first, other) for other in others)
    total = torch.stack(given).double().sum(0) / (size if op == "avg" else 1)
    # sum order differs: up to 6 ranks
    torch.testing.assert_close(first.double(), total, rtol=1e-6, atol=2e-6)


def test_ranks_that_wait_for_two_groups_in_different_orders_do_not_wait_for_each_other():
    """If phases went on only in `wait`, ranks 0 and 1 would stay here: each waits for what the other one
    starts or goes on with later."""

    def waits_late(one: Group, two: Group) -> Tensor:
        tensor = torch.ones(8)
        works = [one.all_reduce(tensor), two.barrier()]
        works[1].wait()
        works[0].wait()
        return tensor

    def waits_at_once(one: Group, two: Group) -> Tensor:
        tensor = torch.ones(8)
        one.all_reduce(tensor).wait()
        two.barrier().wait()
        return tensor

    with hosts_groups([[0, 1], [2, 3]]) as one, hosts_groups([[0, 1], [2, 3]]) as two:
        ranks: list[Callable[[], Tensor]] = [
            lambda pair=pair, body=body: body(*pair)
            for pair, body in zip(zip(one, two, strict=True), [waits_late, waits_at_once] * 2, strict=True)
        ]
        assert all(torch.equal(tensor, torch.full((8,), 4.0)) for tensor in on_threads(ranks))


def test_a_rank_sends_a_kth_of_the_bytes_between_hosts():
    sent: list[int] = []

    class Counted:
        def __init__(self, group: object) -> None:
            self._group = group

        def __getattr__(self, name: str) -> object:
            return getattr(self._group, name)

        def all_reduce(self, tensor: Tensor, op: str) -> object:
            sent.append(tensor.nbytes)
            return self._group.all_reduce(tensor, op)  # type: ignore[attr-defined]

    with hosts_groups([[0, 1, 2], [3, 4, 5]]) as groups:
        for group in groups:
            parts = group._parts
            group._two_level._parts = HostsParts(
                first=parts.first,
                last=parts.last,
                messages=parts.messages,
                across=Counted(parts.across),
                all_ranks=parts.all_ranks,
            )  # type: ignore[arg-type]
        on_threads([lambda group=group: group.all_reduce(torch.ones(302)).wait() for group in groups])
    # 302 = 3 * 100 + 2 elements of 4 bytes; the first rank of a host has the rest
    assert sorted(sent) == [400, 400, 400, 400, 408, 408]


def test_a_failed_phase_is_told_with_the_operation_that_it_was_a_part_of():
    class Failing:
        rank, size = 0, 2

        def reduce_scatter(self, *_: object) -> object:
            raise CollectiveError("rank 0 and rank 1 call different operations.")

    parts = HostsParts(
        first=Failing(), last=Failing(), messages=Failing(), across=Failing(), all_ranks=threaded_groups(4)[0]
    )  # type: ignore[arg-type]
    group = HostsGroup([[0, 1], [2, 3]], parts, ["rank 0", "rank 1", "rank 2", "rank 3"])
    try:
        for _ in range(2):
            with pytest.raises(
                CollectiveError,
                match=r"^rank 0 and rank 1 call different operations. This was a part of all_reduce of 32 B.$",
            ):
                group.all_reduce(torch.ones(8)).wait()
    finally:
        group.close()


@pytest.mark.long
def test_a_rank_that_has_left_ends_the_wait_of_the_others():
    whole = threaded_groups(4)
    inside, across = threaded_groups(2), threaded_groups(2)
    parts = HostsParts(
        first=inside[0], last=inside[0], messages=inside[0], across=across[0], all_ranks=whole[0]
    )
    group = HostsGroup(
        [[0, 1], [2, 3]],
        parts,
        [f"rank {rank} (dp={rank})" for rank in range(4)],
        who_left=lambda: "rank 3 (dp=3)",
    )
    with pytest.raises(
        PeerLostError,
        match=r"rank 0 \(dp=0\) lost rank 3 \(dp=3\), which has aborted, in all_reduce of 12 B.",
    ):
        group.all_reduce(torch.ones(3)).wait()
    group.abort()
    group.close()


def test_uneven_hosts_are_refused():
    one = threaded_groups(3)[0]
    with pytest.raises(CollectiveError, match="need the same number on each"):
        HostsGroup(
            [[0, 1], [2]],
            HostsParts(first=one, last=one, messages=one, across=one, all_ranks=one),
            ["", "", ""],
        )

"""Groups of processes give what the same calls give in one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks, told
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.objects import agree, collect, scatter_objects, share
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.torch import c10d_operations, direct_exchange
from meshloom.comm.torch.c10d import C10dGroup
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CollectiveError, PeerLostError

pytestmark = pytest.mark.processes


def _join(timeout_seconds: float = 20.0) -> C10dGroup:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    size = dist.get_world_size()
    process_group = dist.new_group(
        list(range(size)), backend="gloo", timeout=timedelta(seconds=timeout_seconds)
    )
    assert isinstance(process_group, dist.ProcessGroup)
    return C10dGroup(process_group, [f"rank {rank} (dp={rank})" for rank in range(size)])


def _everything(group: Group) -> list[torch.Tensor]:
    """Every operation on odd sizes and empty tensors; values are small whole numbers, so that the order of a
    sum does not matter."""
    n, rank = group.size, group.rank
    results: list[torch.Tensor] = []

    def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return ((torch.arange(count) * 7 + rank * 5) % 11).to(dtype)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for op in ("sum", "avg", "max", "min"):
            for count in (1, 7, 4099, 0):
                tensor = numbers(count, dtype)
                work = group.all_reduce(tensor, op)
                work.wait()
                results.append(tensor)
                output = torch.empty(count, dtype=dtype)
                work = group.reduce_scatter(output, numbers(count * n, dtype), op)
                work.wait()
                work.wait()  # a second wait changes nothing
                results.append(output)
                whole = numbers(count * n, dtype)
                mine = (
                    whole[rank * count : (rank + 1) * count]
                    if group.is_in_place
                    else torch.empty(count, dtype=dtype)
                )
                work = group.reduce_scatter(mine, whole, op)
                work.wait()
                results.append(mine.clone())
    for count in (1, 7, 0):
        whole = torch.zeros(count * n)
        mine = whole[rank * count : (rank + 1) * count] if group.is_in_place else torch.empty(count)
        work = group.all_gather(whole, mine.copy_(numbers(count)))
        work.wait()
        results.append(whole)
        output = torch.empty(count * n)
        work = group.all_gather(output, numbers(count))
        work.wait()
        results.append(output)
        for root in range(n):
            tensor = numbers(count)
            gathered = [torch.empty(count) for _ in range(n)] if rank == root else None
            started = [
                group.broadcast(tensor, root),
                group.gather(gathered, numbers(count), root),
            ]
            for work in started:
                work.wait()
            results += [tensor, *(gathered or ())]
    # rank s sends (s + r) % n elements to rank r: some pieces are empty
    sizes = [(rank + other) % n for other in range(n)]
    for mine, theirs in (
        (sizes, sizes),
        ([0] * n, [0] * n),
        ([3 if rank == 0 else 0] * n, [3, *[0] * (n - 1)]),
    ):
        output = torch.empty(sum(theirs))
        work = group.all_to_all(output, numbers(sum(mine)), theirs, mine)
        work.wait()
        results.append(output)
    # two messages to the next rank, which arrive in order
    received = [torch.empty(3), torch.empty(5, 2)]
    started = [group.send(numbers(3), (rank + 1) % n), group.send(numbers(10).view(5, 2), (rank + 1) % n)]
    started += [group.recv(each, (rank - 1) % n) for each in received]
    for work in started:
        work.wait()
    results += received
    # several operations under way at once, waited for in another order
    tensors = [numbers(count) for count in (5, 1000, 3)]
    started = [group.all_reduce(tensor) for tensor in tensors]
    for work in reversed(started):
        work.wait()
    parameter = torch.nn.Parameter(numbers(4).clone())
    started = [group.all_reduce(parameter, "avg"), group.barrier()]
    for work in started:
        work.wait()
    return [*results, *tensors, parameter.detach()]


def _everything_on_a_rank() -> list[torch.Tensor]:
    return _everything(_join())


def _everything_directly() -> list[torch.Tensor]:
    direct_exchange._LEAST_BYTES = 0
    group = _join()
    results = _everything(group)
    group.close()
    return results


@pytest.mark.parametrize("on_a_rank", [_everything_on_a_rank, _everything_directly])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_equal_one_process(size: int, on_a_rank: Callable[[], list[torch.Tensor]]):
    expected = in_turns([partial(_everything, group) for group in simulated_groups(size)])
    for here, there in zip(on_ranks(on_a_rank, size), expected, strict=True):
        assert len(here) == len(there)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, there, strict=True))


def _odd_sums() -> torch.Tensor:
    group = _join()
    tensor = torch.randn(10_007, generator=torch.Generator().manual_seed(group.rank))
    group.all_reduce(tensor, "avg").wait()
    return tensor


def test_reduction_is_bit_identical_on_all_ranks_and_near_the_simulated_one():
    first, *others = on_ranks(_odd_sums, 3)
    assert all(torch.equal(first, other) for other in others)
    mean = sum(torch.randn(10_007, generator=torch.Generator().manual_seed(rank)) for rank in range(3)) / 3
    torch.testing.assert_close(first, mean, rtol=1e-6, atol=1e-7)  # sum order differs: 3 ranks


def _many_at_once() -> tuple[list[int], bool]:
    c10d_operations._HELD_BYTES = 2 * 4000  # of which two operations fit
    group = _join()
    sums, everyone = [torch.empty(500) for _ in range(6)], [torch.empty(1000) for _ in range(6)]
    works: list[Any] = []
    held: list[int] = []
    for number, (mine, whole) in enumerate(zip(sums, everyone, strict=True)):
        works.append(group.reduce_scatter(mine, torch.full((1000,), float(number))))
        works.append(group.all_gather(whole, torch.full((500,), float(group.rank))))
        held.append(sum(each.work is not None for each in works))
    for work in works:
        work.wait()
    right = all(bool((mine == 2.0 * number).all()) for number, mine in enumerate(sums))
    right &= all(bool((whole.view(2, 500) == torch.tensor([[0.0], [1.0]])).all()) for whole in everyone)
    dist.destroy_process_group()
    return held, right


def test_what_gloo_copies_is_bounded():
    """zero=1 took more memory than zero=0: Gloo kept a copy of every bucket until the next step, and of all
    parameters while they were gathered."""
    assert on_ranks(_many_at_once, 2) == [([2] * 6, True)] * 2


def _one_after_another() -> int:
    group = _join()
    whole = torch.empty(2)
    for _ in range(100):
        group.all_gather(whole, torch.ones(1)).wait()
    kept = len(group._operations._holding)
    dist.destroy_process_group()
    return kept


def test_operations_that_are_over_are_not_kept():
    """Small ones were kept until 64 MiB had been gathered in all: millions of them in a long run, counted
    again by each."""
    assert on_ranks(_one_after_another, 2) == [1, 1]


def _sums_of_odd_values(group: Group) -> list[torch.Tensor]:
    values = torch.randn(3 * 40_003, generator=torch.Generator().manual_seed(group.rank))
    mine, whole = torch.empty(40_003), torch.empty(3 * 40_003)
    works = [group.reduce_scatter(mine, values, "avg"), group.all_gather(whole, values[:40_003])]
    for work in works:
        work.wait()
    return [mine, whole, values]


def _sums_on_a_rank() -> list[torch.Tensor]:
    return _sums_of_odd_values(_join())


def test_what_is_exchanged_directly_is_added_in_the_order_of_ranks():
    expected = in_turns([partial(_sums_of_odd_values, group) for group in simulated_groups(3)])
    for here, there in zip(on_ranks(_sums_on_a_rank, 3), expected, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, there, strict=True))


def _values_on_a_rank() -> object:
    group = _join()

    def steps() -> object:
        shared = share(group, {"from": group.rank}, 1)
        collected = collect(group, "x" * group.rank)
        scattered = scatter_objects(
            group, [{"rank": rank} for rank in range(group.size)] if group.rank == 2 else None, 2
        )
        try:
            agree(group, {"seed": group.rank // 2})
        except CollectiveError as error:
            return shared, collected, scattered, str(error)
        return None

    return steps()


def test_values_travel_between_processes():
    text = "Ranks disagree: seed is 1 on rank 2 and 0 on rank 0."
    assert on_ranks(_values_on_a_rank, 3) == [
        ({"from": 1}, ["", "x", "xx"], {"rank": rank}, text) for rank in range(3)
    ]


def _one_aborts() -> object:
    group, store = _join(), dist.group.WORLD.get_group_store()
    group.barrier().wait()
    if group.rank == 1:
        work = group.all_reduce(torch.ones(3))
        group.abort()
        group.abort()
        errors = told(work.wait), told(group.barrier)
        store.wait(["0", "2"], timedelta(seconds=30))  # this process lives on: no connection closes
        return errors
    # the second one lacks rank 1
    error = told(lambda: [group.all_reduce(torch.ones(3)).wait() for _ in range(2)])
    store.set(str(group.rank), "")
    return error


def test_abort_fails_operations_of_all_ranks_within_seconds():
    first, aborted, third = on_ranks(_one_aborts, 3)
    assert [(kind, text) for kind, text, _ in aborted] == [
        (PeerLostError, "rank 1 (dp=1) has aborted its group: all_reduce of 12 B cannot run."),
        (PeerLostError, "rank 1 (dp=1) has aborted its group: barrier cannot run."),
    ]
    assert first[0] is third[0] is PeerLostError
    assert first[1] == "rank 0 (dp=0) lost rank 1 (dp=1), which has aborted, in all_reduce of 12 B."
    assert third[1] == "rank 2 (dp=2) lost rank 1 (dp=1), which has aborted, in all_reduce of 12 B."
    assert max(first[2], third[2]) < 5


def _one_aborts_directly() -> object:
    group, store = _join(), dist.group.WORLD.get_group_store()
    group.barrier().wait()
    whole, part = torch.empty(90_000), torch.ones(30_000)
    if group.rank == 1:
        work = group.all_gather(whole, part)
        group.abort()
        errors = told(work.wait), told(lambda: group.all_gather(whole, part))
        store.wait(["0", "2"], timedelta(seconds=30))  # this process lives on: no connection closes
        return errors
    # the second one lacks rank 1
    error = told(lambda: [group.all_gather(whole, part).wait() for _ in range(2)])
    store.set(str(group.rank), "")
    return error


def test_abort_fails_direct_exchanges_of_all_ranks_within_seconds():
    first, aborted, third = on_ranks(_one_aborts_directly, 3)
    there = "rank 1 (dp=1) has aborted its group: all_gather of 117 KiB cannot run."
    assert [(kind, text) for kind, text, _ in aborted] == [(PeerLostError, there)] * 2
    for rank, (kind, text, seconds) in ((0, first), (2, third)):
        assert kind is PeerLostError and seconds < 5
        assert (
            text
            == f"rank {rank} (dp={rank}) lost rank 1 (dp=1), which has aborted, in all_gather of 117 KiB."
        )


def _one_is_killed_directly() -> object:
    group = _join()
    group.barrier().wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mine, whole = torch.empty(30_000), torch.ones(90_000)
    return told(lambda: group.reduce_scatter(mine, whole).wait())


def test_a_killed_process_fails_direct_exchanges_of_the_others_at_once():
    first, _, third = on_ranks(_one_is_killed_directly, 3, may_die=[1])
    for rank, (kind, text, seconds) in ((0, first), (2, third)):
        assert kind is PeerLostError and seconds < 5
        assert text.startswith(f"rank {rank} (dp={rank}) lost one of rank "), text
        # at its start already, or in one of its messages
        assert "in reduce_scatter of 352 KiB: " in text or "a part of reduce_scatter of 352 KiB." in text, (
            text
        )


def _one_is_killed() -> object:
    group = _join()
    group.barrier().wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(
        lambda: (
            group.recv(torch.empty(2), 1).wait()
            if group.rank == 2
            else group.all_reduce(torch.ones(5)).wait()
        )
    )


def test_a_killed_process_fails_operations_of_the_others_at_once():
    first, _, third = on_ranks(_one_is_killed, 3, may_die=[1])
    for rank, operation, (kind, text, seconds) in (
        (0, "all_reduce of 20 B", first),
        (2, "recv of 8 B from rank 1 (dp=1)", third),
    ):
        assert kind is PeerLostError
        assert text.startswith(f"rank {rank} (dp={rank}) lost one of rank ") and f" in {operation}: " in text
        assert seconds < 5


def _one_asks_for_the_other() -> tuple[list[str | None], Tensor, str | None]:
    """What is known of the other rank while it is there, a sum after that, and what is known once it was killed."""
    group = _join()
    assert isinstance(group, C10dGroup)
    operations = group._operations
    before = [operations.who_is_gone(polls) for polls in (1, 2, 3, 4)]
    total = torch.ones(5)
    group.all_reduce(total).wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, gone = time.monotonic(), None
    while gone is None and time.monotonic() < began + 10:
        assert operations.who_is_gone(3) is None  # it does not ask every second
        gone = operations.who_is_gone(4)
    return before, total, gone


def test_a_rank_that_waits_learns_of_a_closed_connection_by_asking():
    """Gloo's own waits do not always end: a message that could not be sent any more is forgotten."""
    (before, total, gone), _ = on_ranks(_one_asks_for_the_other, 2, may_die=[1])
    assert before == [None] * 4 and torch.equal(total, torch.full((5,), 2.0))
    assert gone == "rank 1 (dp=1)"


class _LateWork:
    """A work that ends just after a wait of a second has given up. failure: of the operation."""

    def __init__(self, failure: str | None) -> None:
        self.failure, self.ended = failure, False

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.ended:
            assert timeout is not None
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)

    def is_completed(self) -> bool:
        return self.ended


def _late_works() -> tuple[bool, tuple[type, str, float]]:
    group, late = _join(), cast("Any", _LateWork)
    fine = group._operations.start("all_reduce of 4 B", [torch.ones(1)], lambda: late(None))
    fine.wait()
    failed = group._operations.start("all_reduce of 4 B", [torch.ones(1)], lambda: late("Connection closed"))
    return fine.is_finished(), told(failed.wait)


def test_an_operation_that_ends_as_a_wait_gives_up_is_no_failure():
    """On a busy machine rank 0 "waited too long for rank 2" after one second of ten minutes."""
    for finished, (kind, text, _) in on_ranks(_late_works, 2):
        assert finished and kind is PeerLostError
        assert " lost rank " in text and "Connection closed" in text


def _never_comes() -> object:
    group = _join(timeout_seconds=3.0)
    if group.rank == 1:
        store = group._process_group.get_group_store()  # stays away until the other has given up
        store.wait(["done"], timedelta(seconds=30))
        return None
    result = told(lambda: group.all_reduce(torch.ones(3)).wait())
    gone = group._operations.who_is_gone(4)
    group._process_group.get_group_store().set("done", "")
    return result, gone


def test_a_rank_that_does_not_come_ends_the_wait_at_the_timeout():
    """The timeout closes this rank's connections, which another of its waits took for the other's end."""
    ((kind, text, seconds), gone), _ = on_ranks(_never_comes, 2)
    assert gone is None
    assert kind is PeerLostError
    assert text.startswith("rank 0 (dp=0) waited too long for rank 1 (dp=1) in all_reduce of 12 B: ")
    assert 2 < seconds < 15

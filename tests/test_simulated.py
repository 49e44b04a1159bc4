"""Simulated groups: every collective against its naive version, and every mistake a sentence instead of a
hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CollectiveError, PeerLostError

SIZES = [1, 2, 3, 5]
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0) / len(stack),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def run_on_all(size: int, call: Callable[[Group], Work]) -> None:
    """Start `call` on every rank, then wait for it on every rank."""

    def rank(group: Group) -> None:
        work = call(group)
        work.wait()

    in_turns([partial(rank, group) for group in simulated_groups(size)])


def whole_numbers(*shape: int) -> Tensor:
    """Floats whose sums are exact, so that the order of summation does not matter."""
    return torch.randint(-50, 50, shape).float()


@pytest.mark.parametrize("op", REDUCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.every
def test_all_reduce(size: int, op: str):
    given = whole_numbers(size, 3, 4)
    tensors = list(given.clone())
    run_on_all(size, lambda group: group.all_reduce(tensors[group.rank], op))
    assert all(torch.equal(tensor, REDUCE[op](given)) for tensor in tensors)


@pytest.mark.parametrize("op", REDUCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.every
def test_reduce_scatter(size: int, op: str):
    given = whole_numbers(size, size * 4)
    outputs = [torch.empty(4) for _ in range(size)]
    run_on_all(size, lambda group: group.reduce_scatter(outputs[group.rank], given[group.rank], op))
    assert torch.equal(torch.cat(outputs), REDUCE[op](given))


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_into_a_part_of_the_input(size: int):
    given = whole_numbers(size, size * 4)
    tensors = list(given.clone())
    outputs = [tensor[rank * 4 : rank * 4 + 4] for rank, tensor in enumerate(tensors)]
    run_on_all(size, lambda group: group.reduce_scatter(outputs[group.rank], tensors[group.rank]))
    assert torch.equal(torch.cat(outputs), given.sum(0))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size: int):
    given = whole_numbers(size, 4)
    outputs = [torch.empty(size * 4) for _ in range(size)]
    run_on_all(size, lambda group: group.all_gather(outputs[group.rank], given[group.rank]))
    assert all(torch.equal(output, given.flatten()) for output in outputs)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_with_uneven_sizes(size: int):
    # some are zero
    counts = [[(3 * source + 2 * target) % 4 for target in range(size)] for source in range(size)]
    given = [whole_numbers(sum(row)) for row in counts]
    expected_counts = [[row[target] for row in counts] for target in range(size)]
    outputs = [torch.empty(sum(row)) for row in expected_counts]
    run_on_all(
        size,
        lambda group: group.all_to_all(
            outputs[group.rank], given[group.rank], expected_counts[group.rank], counts[group.rank]
        ),
    )
    for target, output in enumerate(outputs):
        assert torch.equal(
            output, torch.cat([given[source].split(counts[source])[target] for source in range(size)])
        )


@pytest.mark.parametrize("size", SIZES)
def test_gather(size: int):
    given = whole_numbers(size, 2, 3)
    root = size - 1
    outputs = torch.empty(size, 2, 3)
    run_on_all(
        size,
        lambda group: group.gather(list(outputs) if group.rank == root else None, given[group.rank], root),
    )
    assert torch.equal(outputs, given)


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast(source: int):
    given = whole_numbers(3, 4)
    tensors = list(given.clone())
    run_on_all(3, lambda group: group.broadcast(tensors[group.rank], source))
    assert all(torch.equal(tensor, given[source]) for tensor in tensors)


def test_barrier_and_empty_tensors():
    run_on_all(3, lambda group: group.barrier())
    run_on_all(3, lambda group: group.all_reduce(torch.empty(0)))


def test_messages_arrive_in_order_and_are_copies_once_the_sender_has_waited():
    first, second = simulated_groups(2)
    message = torch.tensor([1.0])
    first.send(message, 1).wait()
    message.fill_(2.0)
    first.send(message, 1).wait()
    message.fill_(3.0)
    received = [torch.empty(1), torch.empty(1)]
    for tensor in received:
        second.recv(tensor, 0).wait()
    assert [tensor.item() for tensor in received] == [1.0, 2.0]


def test_a_message_may_be_awaited_before_it_is_sent():
    def rank(group: Group) -> float:
        received = torch.empty(1)
        works = [
            group.recv(received, 1 - group.rank),
            group.send(torch.tensor([float(group.rank)]), 1 - group.rank),
        ]
        for work in works:
            work.wait()
        return received.item()

    assert in_turns([partial(rank, group) for group in simulated_groups(2)]) == [1.0, 0.0]


def test_a_message_that_is_never_sent_is_an_error():
    _, second = simulated_groups(2)
    with pytest.raises(CollectiveError, match=r"^rank 1 waits for a message that rank 0 will not send\.$"):
        second.recv(torch.empty(1), 0).wait()


def test_operations_pair_by_their_number():
    first, second = simulated_groups(2)
    tensors = [torch.tensor([float(number)]) for number in (1, 10, 2, 20)]
    works = [
        first.all_reduce(tensors[0]),
        first.all_reduce(tensors[1]),
        second.all_reduce(tensors[2]),
        second.all_reduce(tensors[3]),
    ]
    for work in works:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [3.0, 30.0, 3.0, 30.0]


def test_operations_that_need_gradients_record_nothing():
    parameter = torch.ones(2, requires_grad=True)
    run_on_all(2, lambda group: group.all_reduce(parameter))
    assert parameter.grad_fn is None


@pytest.mark.parametrize(
    ("other", "pattern"),
    [
        (
            lambda group: group.barrier(),
            r"^Operation 0 differs: rank 0 calls all_reduce\(\(2,\), torch\.float32, sum\), rank 1 calls barrier\(\)\.$",
        ),
        (
            lambda group: group.all_reduce(torch.ones(3)),
            r"rank 1 calls all_reduce\(\(3,\), torch\.float32, sum\)\.$",
        ),
        (
            lambda group: group.all_reduce(torch.ones(2, dtype=torch.float64)),
            r"rank 1 calls all_reduce\(\(2,\), torch\.float64, sum\)\.$",
        ),
        (
            lambda group: group.all_reduce(torch.ones(2), "max"),
            r"rank 1 calls all_reduce\(\(2,\), torch\.float32, max\)\.$",
        ),
    ],
)
def test_ranks_that_call_different_operations_are_named(other: Callable[[Group], Work], pattern: str):
    first, second = simulated_groups(2)
    first.all_reduce(torch.ones(2))
    with pytest.raises(CollectiveError, match=pattern):
        other(second)


def test_all_to_all_sizes_that_do_not_agree_are_named():
    first, second = simulated_groups(2)
    first.all_to_all(torch.empty(2), torch.ones(2), [1, 1], [1, 1])
    with pytest.raises(
        CollectiveError, match=r"^all_to_all: rank 0 expects \[1, 1\] elements and is sent \[1, 2\]\.$"
    ):
        second.all_to_all(torch.empty(1), torch.ones(2), [1, 0], [2, 0]).wait()


def test_waiting_for_ranks_that_will_not_come_names_them():
    groups = simulated_groups(3)
    work = groups[0].all_reduce(torch.ones(2))
    with pytest.raises(
        CollectiveError,
        match=r"^all_reduce\(\(2,\), torch\.float32, sum\) waits for ranks 1, 2, which will not come\.$",
    ):
        work.wait()


def test_an_aborted_group_takes_no_operation():
    first, second = simulated_groups(2)
    first.abort()
    with pytest.raises(PeerLostError, match="Another rank of this group has aborted"):
        second.barrier()


def test_a_collective_may_be_waited_for_in_the_middle_of_a_function():
    groups = simulated_groups(3)

    def rank(group: Group) -> list[float]:
        seen = []
        for number in range(3):
            tensor = torch.tensor([float(group.rank + number)])
            group.all_reduce(tensor).wait()
            seen.append(tensor.item())
        return seen

    assert in_turns([lambda group=group: rank(group) for group in groups]) == [[3.0, 6.0, 9.0]] * 3


def test_a_rank_that_leaves_early_is_named_to_those_who_wait():
    groups = simulated_groups(2)
    with pytest.raises(
        CollectiveError,
        match=r"^all_reduce\(\(1,\), torch\.float32, sum\) waits for rank 1, which will not come\. It is at .*\.\nRank 1 has returned\.$",
    ):
        in_turns([lambda: groups[0].all_reduce(torch.ones(1)).wait(), lambda: None])


def test_sums_are_taken_in_rank_order():
    given = torch.randn(4, 1000)
    tensors = list(given.clone())
    run_on_all(4, lambda group: group.all_reduce(tensors[group.rank]))
    assert torch.equal(tensors[0], ((given[0] + given[1]) + given[2]) + given[3])

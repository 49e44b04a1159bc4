"""Values arrive on every rank as they were handed in, and disagreement names the rank and the fact."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from meshloom.comm.group import Group
from meshloom.comm.objects import (
    _pickled,
    agree,
    collect,
    gather_objects,
    on_rank_0,
    scatter_objects,
    share,
)
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CollectiveError, DataError, PlanError

VALUES = [None, 0, "", "a µ", [1, 2.5, None], {"plan": "dp=4", "steps": [1, 2]}, float("inf"), "x" * 5000]


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("value", VALUES, ids=[str(value)[:12] for value in VALUES])
def test_shared_value_is_the_sources_on_all_ranks(value, source):
    assert (
        in_turns(
            [
                partial(share, group, value if group.rank == source else "ignored", source)
                for group in simulated_groups(3)
            ]
        )
        == [value] * 3
    )


def test_collected_values_of_different_lengths_come_in_rank_order():
    values = ["", "long " * 99, {"a": [1]}, None]
    assert (
        in_turns([partial(collect, group, values[group.rank]) for group in simulated_groups(4)])
        == [values] * 4
    )


@pytest.mark.parametrize("destination", [0, 2])
def test_gathered_objects_come_in_rank_order_to_one_rank(destination: int):
    """Of different lengths, also where a rank has nothing to give."""
    given = [[torch.arange(5.0)], [], [torch.arange(3.0), "text"]]
    found = in_turns(
        [partial(gather_objects, group, given[group.rank], destination) for group in simulated_groups(3)]
    )
    assert [str(each) for each in found[destination]] == [str(each) for each in given]
    assert [each for rank, each in enumerate(found) if rank != destination] == [[], []]


def test_equal_facts_agree():
    assert (
        in_turns([partial(agree, group, {"plan": "dp=3", "parameters": 11}) for group in simulated_groups(3)])
        == [None] * 3
    )


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}],
            "b is 3 on rank 2 and 2 on rank 0. Start all ranks alike.",
        ),
        ([{"a": 1}, {}, {"a": 1}], "a is missing on rank 1 and 1 on rank 0"),
        ([{}, {"a": "x"}, {}], 'a is "x" on rank 1 and missing on rank 0'),
    ],
)
def test_disagreement_names_rank_and_fact(facts, message):
    with pytest.raises(PlanError, match=message):
        in_turns(
            [
                partial(agree, group, facts[group.rank], "Start all ranks alike.", PlanError)
                for group in simulated_groups(3)
            ]
        )


@pytest.mark.parametrize("source", [0, 1])
def test_scattered_objects_arrive_at_their_rank(source):
    batches = [{"x": torch.arange(6.0).view(2, 3)}, None, ["text", torch.ones(2, dtype=torch.bfloat16)]]
    received = in_turns(
        [
            partial(scatter_objects, group, batches if group.rank == source else None, source)
            for group in simulated_groups(3)
        ]
    )
    assert torch.equal(received[0]["x"], batches[0]["x"])
    assert received[1] is None
    assert received[2][0] == "text" and torch.equal(received[2][1], batches[2][1])


def test_a_view_is_sent_without_the_tensor_it_is_a_view_of():
    large = torch.arange(100_000.0)
    text = _pickled([large[5:8], large[5:8]])
    assert len(text) < 5000
    assert torch.equal(pickle.loads(text)[0], large[5:8])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.arange(3.0).expand(4, 3),
        torch.empty(0, 3),
        torch.tensor(2),
        torch.ones(3, dtype=torch.complex64).mul_(1j).conj(),
        torch.ones(3, requires_grad=True),
        torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True),
    ],
)
def test_a_tensor_arrives_as_it_was_and_no_address_is_sent(tensor):
    text = _pickled([tensor, tensor])
    first, second = pickle.loads(text)
    assert first is second and first.dtype == tensor.dtype and first.requires_grad == tensor.requires_grad
    torch.testing.assert_close(first, tensor, rtol=0, atol=0, check_stride=tensor.layout == torch.strided)
    assert tensor.is_sparse or str(tensor.untyped_storage()._cdata).encode() not in text


def test_what_cannot_be_pickled_is_one_sentence():
    with pytest.raises(
        DataError, match="A function cannot be sent to another rank .* Let the dataset or collate return"
    ):
        in_turns(
            [
                partial(scatter_objects, group, [lambda: 0, 1] if group.rank == 0 else None)
                for group in simulated_groups(2)
            ]
        )


def test_as_many_values_as_ranks_must_be_scattered():
    with pytest.raises(CollectiveError, match="1 values to 2 ranks"):
        in_turns(
            [
                partial(scatter_objects, group, [1] if group.rank == 0 else None)
                for group in simulated_groups(2)
            ]
        )


def test_what_the_first_rank_makes_or_its_error_on_all():
    def refuse() -> int:
        raise DataError("No samples.")

    assert in_turns([partial(on_rank_0, group, lambda: 3, DataError) for group in simulated_groups(2)]) == [
        3,
        None,
    ]

    def caught(group: Group) -> str:
        try:
            on_rank_0(group, refuse, DataError)
        except DataError as error:
            return str(error)
        return ""

    assert in_turns([partial(caught, group) for group in simulated_groups(3)]) == ["No samples."] * 3

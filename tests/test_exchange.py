"""The contract that every exchange keeps, whatever a rank owns: the averaged gradient is that of one
device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import TrainingError
from meshloom.core.step_shape import StepShape
from meshloom.telemetry.traffic import Traffic
from tests.covering import few
from tests.exchange_world import (
    EVERY,
    KINDS,
    assert_same,
    backward,
    data,
    gathered,
    mean_of_replicas,
    one_device,
    replicas,
    watch,
    whole_gradients,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.covering("200-3", "1-4", "1000000000-2")
@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("bucket_bytes", few([200, 1, 10**9]))
@pytest.mark.every
@pytest.mark.parametrize("kind", EVERY)
def test_gradients_are_those_of_one_device(kind: str, size: int, bucket_bytes: int) -> None:
    """The naive sum over all chunks, of which the last replica has fewer."""
    size = 1 if kind == "alone" else size
    chunks = data(*range(3, 2 + 2 * size))
    world = replicas(size, kind, bucket_bytes=bucket_bytes)
    independent = world[0][1].ownership.independent
    weight = 0.0 if independent else float(sum(map(len, chunks)))
    shares = [chunks[2 * rank : 2 * rank + 2] for rank in range(size)]
    expected = mean_of_replicas(shares) if independent else one_device(chunks, weight)

    def step(rank: int) -> dict[str, Tensor | None]:
        (model, exchange), share = world[rank], shares[rank]
        backward(model, exchange, share)
        gradients = exchange.finish(weight or float(sum(map(len, share))))
        found = gathered(exchange, gradients)
        exchange.publish()
        return found

    for _ in range(3):  # the second step has an order of buckets of its own, and old gradients to forget
        for found in in_turns([partial(step, rank) for rank in range(size)]):
            assert_same(found, expected)


@every_kind
def test_a_rank_without_samples_takes_part(kind: str) -> None:
    world = replicas(3, kind)
    chunks = data(4, 2)
    for (model, exchange), share in zip(world, ([chunks[0]], [chunks[1]], []), strict=True):
        backward(model, exchange, share)
    for found in whole_gradients(world, 6.0):
        assert_same(found, one_device(chunks, 6.0))


@every_kind
def test_what_one_rank_alone_used_is_not_none_anywhere(kind: str) -> None:
    world = replicas(2, kind)
    backward(*world[0], data(4))
    model, exchange = world[1]
    exchange.begin(StepShape())
    model.never(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    for found in whole_gradients(world, 4.0):
        torch.testing.assert_close(
            found["never.bias"], torch.full((3,), 0.25, dtype=torch.float64), rtol=0, atol=0
        )
        assert found["first.weight"] is not None


@every_kind
def test_every_element_has_one_owner_or_all_ranks_own_it(kind: str) -> None:
    world = replicas(3, kind)
    owned = torch.zeros(sum(parameter.numel() for parameter in world[0][0].parameters()), dtype=torch.int64)
    offsets: dict[str, int] = {}
    for name, parameter in world[0][0].named_parameters():
        offsets[name] = sum(other.numel() for other in list(world[0][0].parameters())[: len(offsets)])
        assert parameter.numel() > 0
    for _, exchange in world:
        for piece in exchange.ownership.owned:
            owned[offsets[piece.name] + piece.start : offsets[piece.name] + piece.stop] += 1
    assert owned.unique().tolist() == ([3] if kind.startswith("all_reduce") else [1])
    if not kind.startswith("all_reduce"):  # those that own any have about as much as each other
        shares = [
            sum(piece.stop - piece.start for piece in exchange.ownership.owned) for _, exchange in world
        ]
        num_owners = {"one_server": 1, "two_servers": 2}.get(kind, 3)
        assert [share > 0 for share in shares] == [rank < num_owners for rank in range(3)]
        # buckets are padded, and the last owner has the padding
        assert max(shares) - min(shares[:num_owners]) < 0.1 * sum(shares)


@every_kind
def test_owners_updates_become_visible_everywhere(kind: str) -> None:
    world = replicas(3, kind)
    for _, exchange in world:
        for piece in exchange.ownership.owned:
            piece.data().add_(torch.arange(piece.start, piece.stop, dtype=torch.float64))
    in_turns([exchange.publish for _, exchange in world])
    torch.manual_seed(0)
    expected = replicas(1, "all_reduce")[0][0]
    for model, _ in world:
        for (name, have), want in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(
                have, want + torch.arange(want.numel(), dtype=torch.float64).view(want.shape)
            ), name


@every_kind
def test_bytes_are_those_of_the_formula(kind: str) -> None:
    groups = [RecordedGroup(group, "dp") for group in simulated_groups(2, of_a_host=True)]
    world = replicas(2, kind, groups=groups)
    for _ in range(4):
        for model, exchange in world:
            backward(model, exchange, data(2))
        in_turns([partial(exchange.finish, 4.0) for _, exchange in world])
        in_turns([exchange.publish for _, exchange in world])
    for group, (_, exchange) in zip(groups, world, strict=True):
        counted = Traffic.of({"dp": group.counts})
        assert exchange.expected_bytes().after(steps=4).over(counted.bytes) == counted


@every_kind
def test_the_first_bucket_starts_before_backward_ends(kind: str) -> None:
    events: list[str] = []

    class Watched(RecordedGroup):
        def all_reduce(self, tensor, op="sum"):  # type: ignore[no-untyped-def]
            events.append("start")
            return super().all_reduce(tensor, op)

        def reduce_scatter(self, output, tensor, op="sum"):  # type: ignore[no-untyped-def]
            events.append("start")
            return super().reduce_scatter(output, tensor, op)

        def gather(self, outputs, tensor, destination):  # type: ignore[no-untyped-def]
            events.append("start")
            return super().gather(outputs, tensor, destination)

    groups = [Watched(group, "dp") for group in simulated_groups(2, of_a_host=True)]
    model, exchange = replicas(2, kind, bucket_bytes=1, groups=groups)[0]
    # the last gradient that backward computes
    model.first.weight.register_hook(lambda _: events.append("first layer"))
    backward(model, exchange, data(3, 3))
    assert events[0] == "first layer"  # in the first chunk's backward nothing travels
    assert events.index("start") < events.index("first layer", 1)


@every_kind
def test_without_overlap_nothing_starts_during_backward(kind: str) -> None:
    groups = [RecordedGroup(group, "dp") for group in simulated_groups(2, of_a_host=True)]
    for model, exchange in replicas(2, kind, overlap=False, groups=groups):
        backward(model, exchange, data(3, 3))
    assert not [name for group in groups for name in group.counts]


@every_kind
def test_a_gradient_after_its_bucket_left_is_an_error(kind: str) -> None:
    model, exchange = replicas(2, kind, bucket_bytes=1)[0]
    exchange.begin(StepShape())
    model.last(torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    with pytest.raises(TrainingError, match=r"last\.(weight|bias) arrived again .* overlap=false"):
        model.last(torch.ones(2, 7, dtype=torch.float64)).sum().backward()


@every_kind
def test_sparse_gradients_are_added_up(kind: str) -> None:
    world = []
    for group in simulated_groups(2, of_a_host=True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 3, sparse=True)
        world.append(
            (table, KINDS[kind](list(table.named_parameters()), group, bucket_bytes=100, overlap=True))
        )
    for table, exchange in world:
        watch(table, exchange)
        exchange.begin(StepShape(chunks=2))
        for rows in ([1, 1], [4]):
            table(torch.tensor(rows)).sum().backward()
            exchange.end_chunk()
    expected = torch.zeros(6, 3)
    expected[1], expected[4] = 4.0, 2.0  # two ranks
    for found in whole_gradients(world, 1.0):  # type: ignore[arg-type]
        assert torch.equal(found["weight"], expected)  # type: ignore[arg-type]

"""The contract that every exchange keeps, whatever a rank owns: the averaged gradient is that of one
device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import TrainingError
from meshloom.telemetry.traffic import Traffic
from tests.covering import few
from tests.exchange_world import KINDS, assert_same, backward, data, one_device, replicas, whole_gradients

pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.covering("200-3", "1-4", "1000000000-2")
@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("bucket_bytes", few([200, 1, 10**9]))
@pytest.mark.every
def test_gradients_are_those_of_one_device(kind: str, size: int, bucket_bytes: int) -> None:
    chunks = data(*range(3, 3 + 2 * size))
    weight = float(sum(len(chunk) for chunk in chunks))
    world = replicas(size, kind, bucket_bytes=bucket_bytes)
    for _ in range(3):  # the second step has an order of buckets of its own, and old gradients to forget
        for rank, (model, exchange) in enumerate(world):
            backward(model, exchange, chunks[2 * rank : 2 * rank + 2])
        for found in whole_gradients(world, weight):
            assert_same(found, one_device(chunks, weight))


def test_a_rank_without_samples_takes_part(kind: str) -> None:
    world = replicas(3, kind)
    chunks = data(4, 2)
    for (model, exchange), share in zip(world, ([chunks[0]], [chunks[1]], []), strict=True):
        backward(model, exchange, share)
    for found in whole_gradients(world, 6.0):
        assert_same(found, one_device(chunks, 6.0))


def test_what_one_rank_alone_used_is_not_none_anywhere(kind: str) -> None:
    world = replicas(2, kind)
    backward(*world[0], data(4))
    model, exchange = world[1]
    exchange.begin_step()
    exchange.begin_last_chunk()
    model.never(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    for found in whole_gradients(world, 4.0):
        torch.testing.assert_close(
            found["never.bias"], torch.full((3,), 0.25, dtype=torch.float64), rtol=0, atol=0
        )
        assert found["first.weight"] is not None


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


def test_without_overlap_nothing_starts_during_backward(kind: str) -> None:
    groups = [RecordedGroup(group, "dp") for group in simulated_groups(2, of_a_host=True)]
    for model, exchange in replicas(2, kind, overlap=False, groups=groups):
        backward(model, exchange, data(3, 3))
    # where they met before the first step
    assert not {name for group in groups for name in group.counts} - {"barrier"}


def test_a_gradient_after_its_bucket_left_is_an_error(kind: str) -> None:
    model, exchange = replicas(2, kind, bucket_bytes=1)[0]
    exchange.begin_step()
    exchange.begin_last_chunk()
    model.last(torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    with pytest.raises(TrainingError, match=r"last\.(weight|bias) arrived again .* overlap=false"):
        model.last(torch.ones(2, 7, dtype=torch.float64)).sum().backward()


def test_sparse_gradients_are_added_up(kind: str) -> None:
    world = []
    for group in simulated_groups(2, of_a_host=True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 3, sparse=True)
        world.append(
            (table, KINDS[kind](list(table.named_parameters()), group, bucket_bytes=100, overlap=True))
        )
    in_turns([exchange.open for _, exchange in world])
    for table, exchange in world:
        table.weight.register_post_accumulate_grad_hook(exchange.gradient_ready)
        exchange.begin_step()
        for rows in ([1, 1], [4]):
            exchange.begin_last_chunk() if rows == [4] else None
            table(torch.tensor(rows)).sum().backward()
    expected = torch.zeros(6, 3)
    expected[1], expected[4] = 4.0, 2.0  # two ranks
    for found in whole_gradients(world, 1.0):  # type: ignore[arg-type]
        assert torch.equal(found["weight"], expected)  # type: ignore[arg-type]

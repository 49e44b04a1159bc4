"""Gradients that are reduce-scattered chunk after chunk: which sums a rank holds, in which order they are made, and
in how much memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.comm.windows import Extent, windows_of
from meshloom.core.errors import TrainingError
from meshloom.core.step_shape import StepShape
from meshloom.exchange.buckets.pool import Pool
from meshloom.exchange.buckets.scattered import ScatteredBuckets

SIZES = (3, 40, 7, 25)  # odd, and one larger than a bucket
BUCKET_BYTES = 8 * 10


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(str(number), nn.Parameter(torch.zeros(size).double())) for number, size in enumerate(SIZES)]


def gradient(rank: int, chunk: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 100 + chunk * 10 + number)
    return torch.randn(SIZES[number], generator=generator, dtype=torch.float64)


class World:
    """Ranks of which each computes its chunks and is told so parameter by parameter, in `order`."""

    def __init__(self, chunks: Sequence[int], *, overlap: bool = True, in_windows: bool = False) -> None:
        self.chunks = chunks
        self.groups = [RecordedGroup(each, "dp") for each in simulated_groups(len(chunks), of_a_host=True)]
        self.named = [parameters() for _ in chunks]
        self.buckets: list[ScatteredBuckets] = []
        for named, group in zip(self.named, self.groups, strict=True):
            windows = windows_of(group) if in_windows else None
            self.buckets.append(
                ScatteredBuckets(
                    named,
                    group,
                    rounds=max(chunks),
                    bucket_bytes=BUCKET_BYTES,
                    overlap=overlap,
                    windows=windows,
                )
            )

    def step(self, order: Sequence[int] = (3, 2, 1, 0), *, whole_chunks: bool = True) -> list[list[Tensor]]:
        """[rank][bucket], this rank's slice of the sum. whole_chunks: the exchange knows where chunks end."""

        def rank(number: int) -> list[Tensor]:
            buckets, named = self.buckets[number], self.named[number]
            buckets.begin(StepShape(chunks=self.chunks[number] if whole_chunks else None))
            for chunk in range(self.chunks[number]):
                self._backward(number, chunk, order)
                if whole_chunks:
                    buckets.end_chunk()
            if not whole_chunks or not self.chunks[number]:
                buckets.end_chunk()
            buckets.start_rest()
            if not buckets.order_is_shared:
                buckets.share_order(self.groups[number])
            assert all(each.grad is None for _, each in named)
            return [each.clone() for each in buckets.collect()]

        return in_turns([lambda number=number: rank(number) for number in range(len(self.chunks))])

    def _backward(self, rank: int, chunk: int, order: Sequence[int]) -> None:
        for number in order:
            parameter = self.named[rank][number][1]
            parameter.grad = gradient(rank, chunk, number)
            self.buckets[rank].hook(parameter)(parameter)

    def expected(self, unused: Sequence[int] = ()) -> list[list[Tensor]]:
        """Rounds one after another, each a sum in the order of ranks."""
        made: list[list[Tensor]] = [[] for _ in self.chunks]
        for bucket in self.buckets[0].buckets:
            total: Tensor | None = None
            for chunk in range(max(self.chunks)):
                of_round = torch.zeros(bucket.extent.num_elements, dtype=torch.float64)
                for rank, count in enumerate(self.chunks):
                    flat = torch.zeros_like(of_round)
                    for entry in bucket.entries:
                        if chunk < count and int(entry.name) not in unused:
                            flat[entry.start : entry.stop] = gradient(rank, chunk, int(entry.name))
                    of_round = of_round + flat if rank else flat
                total = of_round if total is None else total + of_round
            assert total is not None
            for mine, part in zip(made, total.chunk(len(self.chunks)), strict=True):
                mine.append(part)
        return made


def assert_bits(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for here, there in zip(mine, theirs, strict=True):
            assert torch.equal(here, there)


@pytest.mark.parametrize("in_windows", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunks", [(1, 1), (3, 3), (3, 1, 0)])
def test_rounds_are_added_up_in_their_order(chunks: tuple[int, ...], overlap: bool, in_windows: bool):
    world = World(chunks, overlap=overlap, in_windows=in_windows)
    for order in ((3, 2, 1, 0), (3, 2, 1, 0), (0, 2, 3, 1)):  # another order than the one that ranks share
        assert_bits(world.step(order), world.expected())


def test_chunks_that_nobody_tells_of_are_counted_by_parameter():
    world = World((3, 3))
    for _ in range(2):
        assert_bits(world.step(whole_chunks=False), world.expected())


def test_a_parameter_that_no_chunk_uses_is_zero_and_delays_nothing():
    world = World((2, 2))
    for _ in range(2):
        assert_bits(world.step((3, 1, 0)), world.expected(unused=[2]))
    used = [
        entry.arrived for bucket in world.buckets[0].buckets for entry in bucket.entries if entry.name == "2"
    ]
    assert used == [False]


def test_each_round_sends_each_bucket_once():
    world = World((3, 1))
    world.step()
    for group, buckets in zip(world.groups, world.buckets, strict=True):
        sent = group.counts["reduce_scatter"]
        assert sent.calls == 3 * len(buckets.buckets)
        expected = buckets.expected_bytes()
        assert expected.after(steps=1).bytes["dp"] == {
            "reduce_scatter": sent.bytes, "broadcast": group.counts["broadcast"].bytes
        }  # fmt: skip


def test_a_gradient_that_comes_after_its_round_is_an_error():
    world = World((1,))
    buckets, (_, last) = world.buckets[0], world.named[0][3]
    buckets.begin(StepShape(chunks=1))
    with pytest.raises(TrainingError, match="The gradient of 3 arrived again after it had been sent"):
        world._backward(0, 0, (3, 2, 1, 0, 3))
    world = World((1,), overlap=False)
    (found,) = world.step((3, 2, 1, 0, 3))
    assert last.shape == (25,) and torch.equal(found[0][:25], gradient(0, 0, 3))


def test_more_gradients_at_a_time_than_the_pool_has_room_for():
    """What rank 0 completes last is first in the order of the first step, so all other buckets wait for it."""
    world = World((2, 2))
    assert_bits(world.step((2, 1, 0, 3)), world.expected())
    assert [world.buckets[1].buckets[number].entries[0].name for number in world.buckets[1]._order[:1]] != [
        "3"
    ]
    assert_bits(world.step((2, 1, 0, 3)), world.expected())


def test_a_pool_gives_the_first_gap_that_is_large_enough():
    pool = Pool(torch.zeros(256, dtype=torch.uint8))

    def extent(num_elements: int) -> Extent:
        return Extent(num_elements=num_elements, dtype=torch.float32, device=torch.device("cpu"))

    first, second, third = (pool.take(extent(count)) for count in (16, 17, 16))
    assert first is not None and second is not None and third is not None
    assert [each.data_ptr() - first.data_ptr() for each in (second, third)] == [64, 192]
    assert pool.take(extent(1)) is None
    pool.give(first)
    assert pool.holds(second) and not pool.holds(first)
    assert pool.take(extent(17)) is None
    again = pool.take(extent(3))
    assert again is not None and again.data_ptr() == first.data_ptr() and again.numel() == 3
    pool.give(torch.zeros(3))  # not from here
    pool.clear()
    whole = pool.take(extent(64))
    assert whole is not None and whole.numel() == 64

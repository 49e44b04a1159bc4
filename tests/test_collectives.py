"""Changes of placement: on one rank over a group as on all ranks at once, and both as their definition
says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from meshloom.comm.pieces import Pieces, Runs, assemble, owned, place, take, whole
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.program.operators.collectives import Kind, Transition
from meshloom.tensor_parallel.layout.placement import even_parts, shared_parts

CHANGES: list[tuple[Kind, Kind]] = [
    ("invariant", "part"),
    ("invariant", "partial"),
    ("partial", "invariant"),
    ("partial", "part"),
    ("part", "invariant"),
    ("part", "part"),
    ("part", "partial"),
]


def pieces_like(draw: random.Random, shape: tuple[int, ...], num_ranks: int) -> Pieces:
    """All of it; a dim cut in one run or several; fewer indices than ranks, shared by some of them."""
    kind = draw.choice(["whole", "even", "packed", "shared"])
    if kind == "whole":
        return whole(shape, num_ranks)
    dim = draw.randrange(len(shape))

    def held(runs: list[Runs]) -> Pieces:
        return Pieces(
            shape, tuple(tuple(row if each == dim else None for each in range(len(shape))) for row in runs)
        )

    if kind == "even":
        return held(
            [((start, stop),) if start < stop else () for start, stop in even_parts(shape[dim], num_ranks)]
        )
    if kind == "packed":  # two parts after one another, each cut
        first = shape[dim] // 2
        rows = zip(even_parts(first, num_ranks), even_parts(shape[dim] - first, num_ranks), strict=True)
        return held(
            [
                tuple(run for run in ((a, b), (first + c, first + d)) if run[0] < run[1])
                for (a, b), (c, d) in rows
            ]
        )
    outer, _ = shared_parts(2, num_ranks, num_ranks)
    half = shape[dim] // 2
    return held([((0, half),) if number == (0, 1) else ((half, shape[dim]),) for number in outer])


def placed(kind: Kind, pieces: Pieces, value: Tensor, generator: torch.Generator) -> list[Tensor]:
    """What the ranks hold of a value."""
    ranks = range(pieces.num_ranks)
    if kind == "invariant":
        return [value.clone() for _ in ranks]
    if kind == "part":
        return [take(pieces, rank, value).clone() for rank in ranks]
    noise = [torch.randn(value.shape, generator=generator, dtype=value.dtype) for _ in ranks][1:]
    return [value - sum(noise), *noise]


def whole_of(kind: Kind, pieces: Pieces, parts: list[Tensor]) -> Tensor:
    """The value that the ranks hold: equal where several hold it."""
    if kind == "partial":
        return torch.stack(parts).sum(0)
    if kind == "invariant":
        for part in parts[1:]:
            assert torch.equal(part, parts[0])
        return parts[0]
    made = assemble(pieces, parts)
    for rank, part in enumerate(parts):
        torch.testing.assert_close(take(pieces, rank, made), part, rtol=1e-12, atol=1e-12)
    return made


def gradient_of(kind: Kind, pieces: Pieces, gradients: list[Tensor]) -> Tensor:
    """The whole gradient that the ranks hold: of parts the sum of what each has in its place."""
    if kind == "part":
        return torch.stack([place(pieces, rank, gradient) for rank, gradient in enumerate(gradients)]).sum(0)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-12)
    return gradients[0]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
@pytest.mark.every
def test_values_and_gradients_stay_what_they_are(change: tuple[Kind, Kind], seed: int):
    draw = random.Random(f"{change} {seed}")
    generator = torch.Generator().manual_seed(seed)
    num_ranks = draw.choice([2, 3, 4])
    shape = tuple(draw.choice([4, 5, 7]) for _ in range(draw.choice([1, 2, 3])))
    everything = whole(shape, num_ranks)
    before = pieces_like(draw, shape, num_ranks) if change[0] == "part" else everything
    after = pieces_like(draw, shape, num_ranks) if change[1] == "part" else everything
    transition = Transition(source=change[0], target=change[1], before=before, after=after)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    # The gradient that arrives: whole where the new placement has it whole, else parts whose sum it is.
    share = 1 / torch.stack(
        [
            place(after, rank, torch.ones(after.local_shape(rank), dtype=torch.float64))
            for rank in range(num_ranks)
        ]
    ).sum(0)
    arriving = [
        take(after, rank, gradient * share) if change[1] == "part" else gradient for rank in range(num_ranks)
    ]

    groups = simulated_groups(num_ranks)

    def run(rank: int) -> Tensor:
        made = transition.run(groups[rank], parts[rank])
        made.backward(arriving[rank])
        return made.detach()

    parts = [
        part.requires_grad_()
        for part in placed(change[0], before, value, torch.Generator().manual_seed(seed + 1))
    ]
    results = in_turns([lambda rank=rank: run(rank) for rank in range(num_ranks)])
    torch.testing.assert_close(whole_of(change[1], after, results), value, rtol=1e-12, atol=1e-12)
    found = [part.grad if part.grad is not None else torch.zeros_like(part) for part in parts]
    torch.testing.assert_close(gradient_of(change[0], before, found), gradient, rtol=1e-12, atol=1e-12)


def test_every_index_has_one_owner():
    for seed in range(200):
        draw = random.Random(seed)
        pieces = pieces_like(draw, (5, 6), draw.choice([2, 3, 4, 5]))
        if pieces.is_whole:
            continue
        mine = owned(pieces)
        counts = torch.stack(
            [place(mine, rank, torch.ones(mine.local_shape(rank))) for rank in range(mine.num_ranks)]
        ).sum(0)
        assert torch.equal(counts, torch.ones(5, 6))
        assert pieces.is_shared == (sum(pieces.num_elements(rank) for rank in range(pieces.num_ranks)) > 30)

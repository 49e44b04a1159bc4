"""What ranks hold is counted in sections as it is in indices, however many of these there are."""

from __future__ import annotations

import random

import pytest

from meshloom.comm.pieces import Pieces, owned
from meshloom.program.operators.collectives import elements_of_change
from meshloom.tensor_parallel.layout.axes import Axis, concatenation, product
from meshloom.tensor_parallel.layout.cuts import StripNumbers, num_runs, pieces_of, runs_of
from meshloom.tensor_parallel.layout.placement import Cut, even_parts, shared_parts
from meshloom.tensor_parallel.layout.sections import Sections

RANKS = 3


def _axis(draw: random.Random, strips: list[Axis], depth: int) -> Axis:
    """A product or concatenation of axes, or a stretch of a strip."""
    if depth == 0 or draw.random() < 0.3:
        strip = draw.choice(strips)
        start = draw.randrange(strip.size - 1)
        return strip.stretch(start, draw.randint(start + 1, strip.size)) if draw.random() < 0.3 else strip
    parts = [_axis(draw, strips, depth - 1) for _ in range(draw.randint(2, 3))]
    return product(parts) if draw.random() < 0.6 else concatenation(parts)


def _cuts(draw: random.Random, numbers: StripNumbers) -> list[Cut]:
    """Of each axis by itself, evenly and unevenly; of two as a product."""
    cuts: list[Cut] = []
    for number, strip in enumerate(numbers.axes):
        ends = sorted(draw.randint(0, strip.size) for _ in range(RANKS - 1))
        uneven = tuple(zip([0, *ends], [*ends, strip.size], strict=True))
        cuts += [
            Cut(name=f"even {number}", parts={number: even_parts(strip.size, RANKS)}),
            Cut(name=f"uneven {number}", parts={number: uneven}),
        ]
    outer, inner = draw.sample(range(len(numbers.axes)), 2)
    parts = shared_parts(min(2, numbers.axes[outer].size), numbers.axes[inner].size, RANKS)
    return [*cuts, Cut(name="times", parts=dict(zip((outer, inner), parts, strict=True)), is_product=True)]


def _counted(pieces: Pieces) -> object:
    try:
        mine = owned(pieces)
    except ValueError as error:  # overlaps in more than one dim
        return str(error)
    return (
        [[each.num_elements(rank) for rank in range(RANKS)] for each in (pieces, mine)],
        pieces.is_shared,
        pieces.is_whole,
        pieces.size,
    )


def _sent(before: Pieces, after: Pieces) -> object:
    try:
        return [
            elements_of_change("part", "part", before, after, rank, backward=backward)
            for rank in range(RANKS)
            for backward in (False, True)
        ]
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.every
def test_counts_in_sections_are_counts_in_indices(seed: int):
    """Of random axes and cuts: what each rank holds, what it owns, what is shared, and what a change from any
    cut to any other sends."""
    draw = random.Random(seed)
    strips = [Axis(draw.randint(2, 7)) for _ in range(3)]
    numbers = StripNumbers(
        of={each.strip: number for number, each in enumerate(strips)},
        axes=tuple(each.strip for each in strips),
    )
    cuts = _cuts(draw, numbers)
    sections = Sections(
        numbers,
        {number: [cut for cut in cuts if number in cut.parts] for number in range(len(strips))},
        RANKS,
    )
    axes = _axis(draw, strips, 2), _axis(draw, strips, 1)
    pairs = [(pieces_of(axes, cut, numbers, RANKS), sections.pieces(axes, cut)) for cut in cuts]
    for cut, (by_index, by_section) in zip(cuts, pairs, strict=True):
        for axis in axes:
            runs = [runs_of(axis, cut, numbers, rank) for rank in range(RANKS)]
            assert None in runs or [num_runs(axis, cut, numbers, rank) for rank in range(RANKS)] == [
                len(each or ()) for each in runs
            ]
        assert _counted(by_index) == _counted(by_section)
        assert [_sent(by_index, other) for other, _ in pairs] == [
            _sent(by_section, other) for _, other in pairs
        ]


@pytest.mark.parametrize("length", [2**12, 2**30])
def test_a_cut_through_the_inner_part_of_a_product_has_as_many_runs_for_any_length(length: int):
    """131,072 tokens in blocks of 8: each rank had a run for every block, and each run was held against all
    of another rank's, for 85 s."""
    tokens, inner = Axis(length // 8), Axis(8)
    numbers = StripNumbers(
        of={each.strip: number for number, each in enumerate((tokens, inner))},
        axes=(tokens.strip, inner.strip),
    )
    cuts = [
        Cut(name=str(number), parts={number: even_parts(axis.size, 4)})
        for number, axis in enumerate((tokens, inner))
    ]
    sections = Sections(numbers, {0: cuts[:1], 1: cuts[1:]}, 4)
    axes = (product([tokens, inner]),)
    outer, within = (sections.pieces(axes, cut) for cut in cuts)
    assert [len(row[0] or ()) for row in (*outer.held, *within.held)] == [1] * 4 + [4] * 4
    assert elements_of_change("part", "part", outer, within, 0, backward=False) == ("all_to_all", length // 4)
    assert [within.num_elements(rank) for rank in range(4)] == [length // 4] * 4
    assert not within.is_shared and not outer.is_shared

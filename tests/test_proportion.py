"""The decision about shares against a search over all divisions of a batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.data.proportion import MIN_GAIN, fastest_sizes, propose
from tests.compositions import compositions

speeds = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4)


def seconds(sizes: tuple[int, ...] | list[int], per_sample: list[float]) -> float:
    """Of the slowest replica."""
    return max(size * each for size, each in zip(sizes, per_sample, strict=True))


@settings(max_examples=300, deadline=None)
@given(num_samples=st.integers(4, 14), per_sample=speeds)
@pytest.mark.long
def test_no_other_division_lets_the_slowest_be_done_sooner(num_samples: int, per_sample: list[float]) -> None:
    found = fastest_sizes(num_samples, per_sample)
    best = min(seconds(each, per_sample) for each in compositions(num_samples, len(per_sample), least=1))
    assert sum(found) == num_samples and min(found) >= 1
    assert math.isclose(seconds(found, per_sample), best, rel_tol=1e-12)


@given(per_sample=st.lists(st.floats(0.01, 10), min_size=2, max_size=64), num_samples=st.integers(64, 10**7))
def test_large_batches_come_within_a_sample_of_what_fractions_could_do(
    per_sample: list[float], num_samples: int
) -> None:
    fractions = num_samples / sum(1 / each for each in per_sample)
    found = fastest_sizes(num_samples, per_sample)
    assert sum(found) == num_samples
    assert seconds(found, per_sample) <= fractions + max(per_sample) * (1 + 1e-9)


@given(st.data(), speeds.filter(lambda each: len(each) > 1))
@pytest.mark.long
def test_a_proposal_gains_what_it_must_and_is_made_when_it_does(
    data: st.DataObject, per_sample: list[float]
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=len(per_sample), max_size=len(per_sample)))
    proposal = propose(sizes, per_sample)
    best = min(seconds(each, per_sample) for each in compositions(sum(sizes), len(sizes), least=1))
    limit = (1 - MIN_GAIN) * seconds(sizes, per_sample)
    if proposal:
        assert seconds(proposal.sizes, per_sample) <= limit * (1 + 1e-12)
    else:
        assert best >= limit * (1 - 1e-12)


@settings(deadline=None)
@given(
    fixed=st.lists(st.floats(0, 3), min_size=3, max_size=3),
    per_sample=st.lists(st.floats(0.05, 3), min_size=3, max_size=3),
)
def test_where_steps_have_a_fixed_part_repeated_measuring_settles(
    fixed: list[float], per_sample: list[float]
) -> None:
    """Seconds per sample are then a little different for every size; nothing goes back and forth for ever."""
    sizes = (40, 40, 40)
    for _ in range(12):
        taken = [a + b * size for a, b, size in zip(fixed, per_sample, sizes, strict=True)]
        proposal = propose(sizes, [each / size for each, size in zip(taken, sizes, strict=True)])
        if proposal is None:
            break
        sizes = proposal.sizes
    else:
        raise AssertionError(f"still changing: {sizes}")

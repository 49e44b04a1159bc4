"""The setting `shares`: quotas against a search over all divisions, its one text, and what it does not go
with."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.core.plan_shares import apportion, chunk_sizes
from tests.compositions import compositions

relative = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(num_samples=st.integers(0, 11), shares=relative)
def test_no_other_division_is_nearer_to_the_quotas(num_samples: int, shares: list[int]) -> None:
    quotas = [Fraction(num_samples * share, sum(shares)) for share in shares]

    def distance(sizes: tuple[int, ...]) -> Fraction:
        return sum(((size - quota) ** 2 for size, quota in zip(sizes, quotas, strict=True)), Fraction())

    sizes = apportion(num_samples, shares)
    assert sum(sizes) == num_samples
    assert distance(tuple(sizes)) == min(distance(each) for each in compositions(num_samples, len(shares)))
    assert all(abs(size - quota) < 1 for size, quota in zip(sizes, quotas, strict=True))


@given(num_samples=st.integers(0, 200), shares=relative, factor=st.integers(2, 10**9))
@pytest.mark.long
def test_only_proportions_count(num_samples: int, shares: list[int], factor: int) -> None:
    assert apportion(num_samples, shares) == apportion(num_samples, [factor * share for share in shares])


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_shares_that_are_the_samples_of_a_full_batch_are_kept(shares: list[int]) -> None:
    assert apportion(sum(shares), shares) == shares


@given(num_samples=st.integers(0, 200), dp=st.integers(2, 8))
def test_equal_shares_of_one_chunk_each_are_the_even_cut(num_samples: int, dp: int) -> None:
    equal = "+".join(["7"] * dp)
    assert (
        Plan(dp=dp, shares=equal).sizes(num_samples)
        == Plan(dp=dp).sizes(num_samples)
        == chunk_sizes(num_samples, dp)
    )


@given(
    num_samples=st.integers(0, 200),
    shares=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any),
    m=st.integers(1, 4),
)
@pytest.mark.long
def test_chunks_of_a_share_are_as_even_as_can_be(num_samples: int, shares: list[int], m: int) -> None:
    sizes = Plan(dp=len(shares), microbatches=m, shares="+".join(map(str, shares))).sizes(num_samples)
    of_replica = [sizes[start : start + m] for start in range(0, len(sizes), m)]
    assert [sum(each) for each in of_replica] == apportion(num_samples, shares)
    assert all(each == sorted(each, reverse=True) and each[0] - each[-1] <= 1 for each in of_replica)


def test_the_largest_share_is_that_of_the_first_replica_that_has_most() -> None:
    assert Plan(dp=3, microbatches=2, shares="1+4+1").largest_share(13) == [5, 4]
    assert Plan(dp=3, microbatches=2).largest_share(13) == [3, 2]
    assert Plan(dp=2, microbatches=3, shares="0+1").largest_share(2) == [1, 1]


@pytest.mark.parametrize(
    ("text", "written"),
    [("6+6+2", "3+3+1"), ("2+2+2", "1+1+1"), ("0+4+8", "0+1+2"), ("measured", "measured")],
)
def test_a_plan_writes_shares_in_one_way(text: str, written: str) -> None:
    plan = Plan.parse(f"dp=3,shares={text}")
    assert str(plan) == f"dp=3,shares={written}" and Plan.from_json(plan.to_json()) == plan
    assert str(Plan(dp=3, shares="even")) == "dp=3"


def test_batch_statistics_of_all_replicas_need_a_sample_in_every_chunk() -> None:
    plan = Plan.parse("dp=2,microbatches=2,shares=5+1,sync_batch_norm=true")
    plan.check_batch(12)
    with pytest.raises(PlanError) as caught:
        plan.check_batch(8)
    assert str(caught.value) == (
        "A batch of 8 samples cannot fill 4 chunks (dp=2 x microbatches=2, shares=5+1), and sync_batch_norm needs a sample in each. "
        "Use fewer chunks or shares that differ less, or drop_last=True if this is the short last batch."
    )

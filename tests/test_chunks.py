"""Chunks cover a batch once, in order, and depend on dp * microbatches alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.core.plan import Plan
from meshloom.data.chunks import share_of, split_batch


@given(num_samples=st.integers(0, 40), dp=st.integers(1, 5), microbatches=st.integers(1, 4))
def test_shares_of_all_replicas_are_the_batch_in_order(num_samples, dp, microbatches):
    plan = Plan(dp=dp, microbatches=microbatches)
    shares = [share_of(replica, split_batch(num_samples, plan), plan) for replica in range(dp)]
    assert all(len(share) == microbatches for share in shares)
    cuts = [cut for share in shares for cut in share]
    assert [cut.index for cut in cuts] == list(range(dp * microbatches))
    assert [sample for cut in cuts for sample in range(cut.start, cut.stop)] == list(range(num_samples))
    sizes = [cut.samples for cut in cuts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(num_samples=st.integers(0, 40), dp=st.integers(1, 5), microbatches=st.integers(1, 4))
@pytest.mark.long
def test_plans_with_as_many_chunks_cut_alike(num_samples, dp, microbatches):
    assert split_batch(num_samples, Plan(dp=dp, microbatches=microbatches)) == split_batch(
        num_samples, Plan(microbatches=dp * microbatches)
    )

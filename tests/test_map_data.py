"""What a step reads does not depend on dp, workers or where the run began."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_jobs import Augmented, job_of, read_chunks, same

from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.core.random import sample_order
from meshloom.data.job_data import open_reader


def test_an_epoch_visits_every_sample_once_in_the_shuffled_order():
    data = Augmented(10)
    steps = read_chunks(job_of(data, shuffle=True), Plan(), 0, 6)  # two epochs of batches of 4, 4, 2
    assert [chunk.samples for (chunk,) in steps] == [4, 4, 2, 4, 4, 2]
    assert data.read == sample_order(0, 0, 10, True) + sample_order(0, 1, 10, True)
    assert sorted(data.read[:10]) == list(range(10)) and data.read[:10] != data.read[10:]


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    dp=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
)
def test_replicas_together_read_what_one_device_reads(
    num_samples, batch_size, dp, microbatches, drop_last, seed
):
    job = job_of(
        lambda: Augmented(num_samples),
        batch_size=batch_size,
        drop_last=drop_last and num_samples >= batch_size,
        seed=seed,
    )
    alone = read_chunks(job, Plan(), 0, 7)
    parallel = read_chunks(job, Plan(dp=dp, microbatches=microbatches), 0, 7)
    for (whole,), chunks in zip(alone, parallel, strict=True):
        assert [chunk.index for chunk in chunks] == list(range(dp * microbatches))
        filled = [chunk for chunk in chunks if chunk.data is not None]
        # the same samples with the same draws, in order
        assert torch.equal(torch.cat([chunk.data for chunk in filled]), whole.data)
        assert [len(chunk.data) for chunk in filled] == [chunk.samples for chunk in chunks if chunk.samples]


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(start=st.integers(0, 8), dp=st.sampled_from([1, 2, 3]), drop_last=st.booleans())
def test_resuming_at_any_step_reads_what_an_uninterrupted_run_reads(start, dp, drop_last):
    job, plan = job_of(lambda: Augmented(11), drop_last=drop_last), Plan(dp=dp, microbatches=2)
    assert same(read_chunks(job, plan, start, 9), read_chunks(job, plan, 0, 9)[start:])


@pytest.mark.processes
@pytest.mark.parametrize("dp", [1, 2])
def test_workers_read_what_the_rank_itself_reads(dp):
    def read(num_workers):
        return read_chunks(
            job_of(lambda: Augmented(11), num_workers=num_workers), Plan(dp=dp, microbatches=2), 1, 7
        )

    assert same(read(2), read(0))


@pytest.mark.processes
def test_draws_in_collate_belong_to_the_chunk():
    def masked(samples):
        return torch.stack(samples)[:, 0] * torch.rand(len(samples))

    def read(dp, microbatches, num_workers=0):
        job = job_of(lambda: Augmented(11), collate=masked, num_workers=num_workers)
        return read_chunks(job, Plan(dp=dp, microbatches=microbatches), 0, 5)

    assert same(read(1, 4), read(4, 1)) and same(read(1, 4), read(2, 2, num_workers=1))


@pytest.mark.processes
def test_another_step_than_the_next_is_found():
    job, plan = job_of(lambda: Augmented(11), num_workers=1), Plan(dp=2)
    straight = read_chunks(job, plan, 0, 6)
    assert same(
        read_chunks(job, plan, 0, 6, steps=[3, 4, 0, 0, 5]), [straight[step] for step in (3, 4, 0, 0, 5)]
    )


def test_nobody_reads_another_replicas_samples():
    built = []

    def build():
        built.append(Augmented(12))
        return built[-1]

    read_chunks(job_of(build, shuffle=False), Plan(dp=2), 0, 3)
    assert [dataset.read for dataset in built] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.processes
def test_the_callers_generators_are_left_alone():
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    expected = torch.rand(3), random.random(), numpy.random.rand()
    for num_workers in (0, 1):
        torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
        read_chunks(job_of(lambda: Augmented(8), num_workers=num_workers), Plan(dp=2), 0, 3)
        assert (
            torch.equal(torch.rand(3), expected[0])
            and random.random() == expected[1]
            and numpy.random.rand() == expected[2]
        )


def test_short_last_batch_gives_some_replicas_nothing():
    (chunks,) = read_chunks(job_of([1.0, 2.0], batch_size=4), Plan(dp=4), 0, 1)
    assert [chunk.samples for chunk in chunks] == [1, 1, 0, 0]
    assert [chunk.data is None for chunk in chunks] == [False, False, True, True]


def test_collate_sees_one_chunk_at_a_time():
    (chunks,) = read_chunks(
        job_of(list(range(7)), batch_size=7, collate=list, shuffle=False), Plan(dp=2, microbatches=2), 0, 1
    )
    assert [chunk.data for chunk in chunks] == [[0, 1], [2, 3], [4, 5], [6]]


def test_synchronised_statistics_refuse_a_batch_that_does_not_fill_the_chunks():
    plan = Plan(dp=2, microbatches=2, sync_batch_norm=True)
    job = job_of(lambda: Augmented(10), batch_size=4)  # 4, 4, 2
    assert len(read_chunks(job, plan, 0, 2)) == 2  # does not get to the short one
    with pytest.raises(PlanError, match="A batch of 2 samples cannot fill 4 chunks"):
        read_chunks(job, plan, 0, 3)
    with pytest.raises(PlanError, match="A batch of 2 samples cannot fill 4 chunks"):
        read_chunks(job, plan, 4, 6)


def test_a_run_of_no_steps_reads_nothing():
    data = Augmented(5)
    reader = open_reader(job_of(data), Plan(), simulated_groups(1)[0], 3, 3)
    reader.close()
    assert data.read == [] and reader.num_samples == 5

"""A stream is read once, by one rank, and every plan and every resume sees the same chunks of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_jobs import Stream, draws, job_of, read_chunks, same
from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError, JobError, PlanError
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches


def whole_batches(num_samples, batch_size, drop_last, steps):
    """The naive version: which sample numbers each step reads."""
    batches, epoch = [], 0
    while len(batches) < steps:
        numbers = list(range(epoch * num_samples, (epoch + 1) * num_samples))
        cut = [numbers[start : start + batch_size] for start in range(0, num_samples, batch_size)]
        batches += [batch for batch in cut if len(batch) == batch_size or not drop_last]
        epoch += 1
    return batches[:steps]


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(1, 12),
    batch_size=st.integers(1, 7),
    dp=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_replicas_together_read_the_stream_in_order(num_samples, batch_size, dp, microbatches, drop_last):
    drop_last = drop_last and num_samples >= batch_size
    job = job_of(lambda: Stream(num_samples), batch_size=batch_size, drop_last=drop_last)
    alone = read_chunks(job, Plan(), 0, 6)
    parallel = read_chunks(job, Plan(dp=dp, microbatches=microbatches), 0, 6)
    for (whole,), chunks, numbers in zip(
        alone, parallel, whole_batches(num_samples, batch_size, drop_last, 6), strict=True
    ):
        assert whole.data[:, 0].tolist() == numbers
        assert [chunk.index for chunk in chunks] == list(range(dp * microbatches))
        assert torch.equal(torch.cat([chunk.data for chunk in chunks if chunk.samples]), whole.data)
        assert all(chunk.data is None for chunk in chunks if not chunk.samples)


def test_one_rank_reads_and_nothing_twice():
    built = []

    def build():
        built.append(Stream(10))
        return built[-1]

    read_chunks(job_of(build), Plan(dp=3), 0, 5)
    # 4 + 4 + 2, and 4 + 4 of the next epoch
    assert built[0].read == list(range(18)) and built[1].read == built[2].read == []


@pytest.mark.parametrize("start", range(7))
def test_resuming_a_stream_at_any_step(start):
    job, plan = job_of(lambda: Stream(10)), Plan(dp=2, microbatches=2)
    assert same(read_chunks(job, plan, start, 7), read_chunks(job, plan, 0, 7)[start:])


@pytest.mark.processes
def test_reading_ahead_in_a_worker_changes_nothing():
    def read(num_workers, start=0):
        return read_chunks(job_of(lambda: Stream(10), num_workers=num_workers), Plan(dp=2), start, 7)

    assert same(read(1), read(0)) and same(read(1, 4), read(0, 4))


def test_another_step_of_a_stream_is_found():
    job, plan = job_of(lambda: Stream(10)), Plan(dp=2)
    straight = read_chunks(job, plan, 0, 6)
    assert same(read_chunks(job, plan, 0, 6, steps=[3, 4, 0, 5]), [straight[step] for step in (3, 4, 0, 5)])


def test_an_epoch_is_started_under_a_seed_of_its_own():
    class Shuffled:
        def __iter__(self):
            return iter([draws(index) for index in torch.randperm(8).tolist()])

    steps = read_chunks(job_of(Shuffled, batch_size=8), Plan(), 0, 2)
    assert same(steps, read_chunks(job_of(Shuffled, batch_size=8), Plan(), 0, 2))
    assert not torch.equal(steps[0][0].data, steps[1][0].data)


def test_more_than_one_worker_is_refused():
    with pytest.raises(
        JobError,
        match="num_workers=2 would read every sample of an iterable dataset 2 times. Use num_workers=1",
    ):
        read_chunks(job_of(lambda: Stream(10), num_workers=2), Plan(dp=2), 0, 1)


def test_empty_stream():
    with pytest.raises(DataError, match="The stream has no samples"):
        read_chunks(job_of(lambda: Stream(0)), Plan(dp=2), 0, 1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_stream_that_runs_dry(num_workers):
    with pytest.raises(
        DataError,
        match="no samples in epoch 1: it ran dry after epoch 0. Its __iter__ must start anew each time",
    ):
        read_chunks(job_of(lambda: (index for index in range(8)), num_workers=num_workers), Plan(dp=2), 0, 3)


def test_stream_shorter_than_a_batch_that_is_dropped():
    with pytest.raises(
        DataError, match=r"Epoch 0 of the stream has 3 samples, and drop_last=True drops .*\(batch_size=4\)"
    ):
        read_chunks(job_of(lambda: Stream(3), drop_last=True), Plan(), 0, 1)


def test_short_batch_of_a_stream_under_synchronised_statistics():
    job, plan = job_of(lambda: Stream(5)), Plan(dp=2, sync_batch_norm=True)
    assert len(read_chunks(job, plan, 0, 1)) == 1
    with pytest.raises(PlanError, match="A batch of 1 samples cannot fill 2 chunks"):
        read_chunks(job, plan, 0, 2)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_error_in_a_stream_names_sample_and_line(num_workers):
    class Fails(IterableDataset):
        def __iter__(self):
            yield 1
            raise ValueError("broken record")

    with pytest.raises(
        DataError,
        match=rf"Reading sample 1 of epoch 0 of the stream failed at {__file__}:\d+ in __iter__: ValueError: broken record",
    ):
        read_chunks(job_of(Fails, num_workers=num_workers), Plan(dp=2), 0, 1)


def test_error_in_starting_a_stream():
    class Fails:
        def __iter__(self):
            raise OSError("no such file")

    with pytest.raises(
        DataError,
        match=rf"Starting epoch 0 of the stream failed at {__file__}:\d+ in __iter__: OSError: no such file",
    ):
        read_chunks(job_of(Fails), Plan(), 0, 1)


def test_error_in_collating_a_stream_names_its_samples():
    def collate(samples):
        return samples[3]

    with pytest.raises(
        DataError,
        match=r"Collating chunk 0 of step 0 \(samples 0 of epoch 0, 1 of epoch 0\) failed at .* in collate: IndexError",
    ):
        read_chunks(job_of(lambda: Stream(4), collate=collate), Plan(dp=2), 0, 1)


def test_a_short_stream_is_said_to_drop_samples_only_where_it_does():
    """The first batches, which programs are read with, are full ones: without drop_last the samples are repeated."""
    (batch,) = first_batches(job_of(lambda: Stream(3), batch_size=4), 1)
    assert len(batch) == 4
    with pytest.raises(DataError, match="has 3 samples, and drop_last=True drops the short batch of them"):
        first_batches(job_of(lambda: Stream(3), batch_size=4, drop_last=True), 1)


def test_first_batches_pass_over_short_ones():
    for drop_last in (False, True):
        batches = first_batches(job_of(lambda: Stream(7), batch_size=3, drop_last=drop_last), 4)
        assert [len(each) for each in batches] == [3, 3, 3, 3]

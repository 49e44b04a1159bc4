"""A job's data becomes a reader, or one sentence about what is wrong with it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_jobs import Augmented, Stream, job_of, read_chunks, same
from torch.utils.data import TensorDataset

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import DataError, JobError
from meshloom.core.job import Evaluate
from meshloom.core.plan import Plan
from meshloom.data.job_data import evaluation_chunks, open_reader


def open_on(datasets, **settings):
    """Readers of ranks that build different datasets."""
    plan, groups = Plan(dp=len(datasets)), simulated_groups(len(datasets))
    return in_turns(
        [
            partial(
                open_reader, job_of(lambda rank=group.rank: datasets[rank], **settings), plan, group, 0, 5
            )
            for group in groups
        ]
    )


def test_length_that_differs_between_ranks():
    message = "the number of samples in the dataset is 9 on rank 2 and 8 on rank 0. Job.data=.... must build the same dataset on every rank"
    with pytest.raises(DataError, match=message):
        open_on([[1] * 8, [1] * 8, [1] * 9])


def test_kind_that_differs_between_ranks():
    with pytest.raises(
        DataError, match='the kind of dataset is "iterable" on rank 1 and "map-style" on rank 0'
    ):
        open_on([[1] * 8, Stream(8)])


def test_items_without_a_length_are_no_dataset():
    endless = type("Endless", (), {"__getitem__": lambda self, index: index})()
    with pytest.raises(JobError, match="built Endless, which has __getitem__ but no __len__"):
        open_on([endless])


@pytest.mark.parametrize(
    "dataset", [[1.0, 2.0, 3.0], torch.arange(3.0), TensorDataset(torch.arange(3.0)), Augmented(3)]
)
def test_map_style_is_what_has_a_length_and_items(dataset):
    (reader,) = open_on([dataset])
    assert reader.num_samples == 3
    reader.close()


@pytest.mark.parametrize("dataset", [Stream(3), {1, 2, 3}, iter([1, 2, 3])])
def test_iterable_is_what_has_no_items(dataset):
    (reader,) = open_on([dataset])
    assert reader.num_samples is None
    reader.close()


def test_random_data_is_built_alike_on_every_rank_and_the_callers_draws_are_kept():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    job = job_of(lambda: torch.rand(8), shuffle=False)
    assert torch.equal(
        torch.cat([chunk.data for chunk in read_chunks(job, Plan(dp=4), 0, 1)[0]]),
        read_chunks(job, Plan(), 0, 1)[0][0].data,
    )
    assert torch.equal(torch.rand(2), expected)


@settings(deadline=None, max_examples=40)
@given(
    num_samples=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    dp=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    own=st.none() | st.integers(1, 9),
)
@pytest.mark.long
def test_evaluation_reads_every_sample_once_in_order(num_samples, batch_size, dp, microbatches, own):
    evaluate = Evaluate(lambda: [0], {"a": lambda model, batch: batch}, 1, batch_size=own)
    job = job_of([0], batch_size=batch_size, evaluate=evaluate)
    plan = Plan(dp=dp, microbatches=microbatches)
    chunks = [
        chunk
        for group in simulated_groups(dp)
        for chunk in evaluation_chunks(Augmented(num_samples), job, plan, group)
    ]
    chunks.sort(key=lambda chunk: (chunk.step, chunk.index))
    assert all(chunk.samples == len(chunk.data) > 0 for chunk in chunks)
    size = own or batch_size
    assert all({int(each) // size for each in chunk.data[:, 0]} == {chunk.step} for chunk in chunks)
    assert torch.cat([chunk.data for chunk in chunks])[:, 0].tolist() == list(range(num_samples))
    (alone,) = (
        [chunk.data for chunk in evaluation_chunks(Augmented(num_samples), job, Plan(), group)]
        for group in simulated_groups(1)
    )
    assert torch.equal(torch.cat([chunk.data for chunk in chunks]), torch.cat(alone))


@pytest.mark.processes
def test_evaluation_draws_the_same_each_time_with_and_without_workers():
    group = simulated_groups(2)[1]
    runs = [
        list(evaluation_chunks(Augmented(9), job_of([0], num_workers=workers), Plan(dp=2), group))
        for workers in (0, 0, 2)
    ]
    assert (
        [chunk.samples for chunk in runs[0]] == [2, 2]
        and same([runs[0]], [runs[1]])
        and same([runs[0]], [runs[2]])
    )


@pytest.mark.processes
def test_evaluation_left_in_the_middle_ends_its_workers():
    for chunk in evaluation_chunks(Augmented(9), job_of([0], num_workers=2), Plan(), simulated_groups(1)[0]):
        assert chunk.samples == 4
        break  # the hygiene fixture sees whether processes are left


def test_evaluation_needs_samples():
    with pytest.raises(DataError, match="The evaluation dataset is empty"):
        evaluation_chunks([], job_of([0]), Plan(), simulated_groups(1)[0])

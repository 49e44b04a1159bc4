"""The first batches are those that training reads, and reading them changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from jobs import make_job, vectors
from reading_jobs import Augmented, job_of, read_chunks
from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from tests.covering import slow
from tests.verified import equals_one_device


class Stream(IterableDataset[torch.Tensor]):
    """Samples that are drawn when they are read."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return (torch.rand(2) + number for number in range(self.length))


@pytest.mark.parametrize("make", [lambda: Augmented(10), Stream], ids=["map", "stream"])
def test_they_are_the_chunks_of_the_first_steps(make: Any):
    job = job_of(make(), batch_size=5)
    # the third is of the next epoch
    chunks = [chunk.data for step in read_chunks(job, Plan(), 0, 3) for chunk in step]
    states = torch.get_rng_state(), random.getstate()
    found = first_batches(job, 3)
    assert all(torch.equal(one, other) for one, other in zip(found, chunks, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    after = [chunk.data for step in read_chunks(job, Plan(), 0, 3) for chunk in step]
    assert all(torch.equal(one, other) for one, other in zip(after, chunks, strict=True))


@pytest.mark.parametrize("make", [lambda: Augmented(10), Stream], ids=["map", "stream"])
def test_all_have_the_size_that_is_asked_for(make: Any):
    # epochs of 4, 4 and a rest of 2 that is left out
    found = first_batches(job_of(make(), batch_size=10), 4, size=4)
    assert [len(each) for each in found] == [4] * 4
    assert first_batches(make_job("mlp", "sgd"), 1)[0]["x"].shape == (12, 7)


@pytest.mark.parametrize("make", [lambda: Augmented(3), lambda: Stream(3)], ids=["map", "stream"])
def test_an_epoch_of_fewer_samples_than_a_batch_repeats_them(make: Any):
    job = job_of(make(), batch_size=8)
    epochs = [chunk.data for step in read_chunks(job, Plan(), 0, 2) for chunk in step]
    assert [len(each) for each in epochs] == [3, 3]
    found = first_batches(job, 2)
    assert all(
        torch.equal(one, torch.cat([of_epoch] * 3)[:8]) for one, of_epoch in zip(found, epochs, strict=True)
    )


@pytest.mark.parametrize(
    "plan", ["pp=2", *map(slow, ("tp=2,tp_placements=first:column+second:row", "recompute=full"))]
)
@pytest.mark.long
def test_fewer_samples_than_a_batch_train_where_losses_are_captured(plan: str):
    job = make_job("mlp", "sgd", data=lambda: vectors(5))
    equals_one_device(job, plan)


def test_data_without_a_batch_is_the_error_that_training_raises():
    dropping = {"batch_size": 11, "drop_last": True}
    for make in (Augmented, Stream):
        with pytest.raises(DataError, match="has 10 samples, and drop_last=True drops") as here:
            first_batches(job_of(make(10), **dropping), 2)
        with pytest.raises(DataError) as there:
            read_chunks(job_of(make(10), **dropping), Plan(), 0, 1)
        assert str(here.value) == str(there.value)
    with pytest.raises(DataError, match="The dataset is empty"):
        first_batches(job_of(Augmented(0)), 2)
    with pytest.raises(DataError, match="The stream has no samples"):
        first_batches(job_of(Stream(0)), 2)


def test_a_stream_that_can_be_read_once_is_not_taken_from_training():
    once = iter([torch.ones(1)] * 4)
    with pytest.raises(DataError, match="can be read only once"):
        first_batches(job_of(once, batch_size=2), 1)
    assert len(list(once)) == 4


def test_what_fails_is_named():
    class Fails(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("no file")

    with pytest.raises(
        DataError,
        match=r"Reading sample \d+ \(step 0\) failed at .*test_samples.py:\d+ in __getitem__: ValueError: no file",
    ):
        first_batches(job_of(Fails(10)), 1)

"""The first batches of a job's data, read without any effect on a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.random import preserved_draws
from meshloom.data.job_data import build_dataset, is_iterable
from meshloom.data.map_data import Batches, ChunkSource, ReadRequest
from meshloom.data.reading import Collation, ReadFailure
from meshloom.data.stream_data import partners_of, stream_batches


def first_batches(job: Job, number: int, size: int | None = None) -> list[Any]:
    """The first `number` batches of `size` samples (default: the global batch), collated, over enough epochs.

    Samples, their order and their draws are those of training; batches of the default size are too, up to the
    first short one, which is left out here. The data is built once more and read in this process; generators
    are restored. Raises `DataError` if the data has fewer than `size` samples, cannot be read, or is an
    iterator that `data` returns each time, which can be read only once.
    """
    full_batches = replace(job, batch_size=size or job.batch_size, batch_sizes={}, drop_last=True)
    dataset = build_dataset(job.data, job.seed)
    with preserved_draws():
        read = _from_stream if is_iterable(dataset, "Job(data=...)") else _from_map
        batches: list[Any] = []
        for batch in islice(read(dataset, full_batches), number):
            if isinstance(batch, ReadFailure):
                raise batch.to_error()
            batches.append(batch)
        return batches


def _from_map(dataset: Any, job: Job) -> Iterator[Any]:
    if len(dataset) < job.batch_size:
        raise DataError(
            f"The dataset has {len(dataset)} samples, and a batch needs {job.batch_size}. Use a smaller batch_size or more data."
        )
    batches = Batches(job, len(dataset))
    source = ChunkSource(dataset, job)
    for step in count():
        epoch, indices = batches.of(step)
        yield source[ReadRequest(step, 0, epoch, indices, batches.partners(step))]


def _from_stream(dataset: Any, job: Job) -> Iterator[Any]:
    once = not isinstance(dataset, IterableDataset) and iter(dataset) is dataset
    if once and build_dataset(job.data, job.seed) is dataset:
        raise DataError(
            f"Job(data=...) returns the same {type(dataset).__name__} each time, which can be read only once: its first samples would be missing "
            "in training. Build it in the function, or make it an IterableDataset."
        )
    collate = Collation(job)
    for step, batch in enumerate(stream_batches(dataset, job)):
        if isinstance(batch, ReadFailure):
            yield batch
            return
        names, samples = zip(*batch, strict=True)
        yield collate(list(samples), step, 0, names, partners_of(job, step, samples))

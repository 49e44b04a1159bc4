"""The first batches of a job, for whoever wants to look at what it trains on: no run notices that they were
read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.random import preserved_draws
from meshloom.data.data import build_dataset, is_stream
from meshloom.data.map_data import Batches, ChunkSource, ReadRequest
from meshloom.data.reading import Collation, ReadFailure
from meshloom.data.stream_data import stream_batches


def first_batches(job: Job, count: int, size: int | None = None) -> list[Any]:
    """The first `count` batches of `size` samples each (default: the global batch), as `collate` makes them;
    epoch after epoch if one is too short.

    Samples, their order and their draws are those of training, and so are batches of the default size up to
    the first short one, which is left out here. The data is built anew and read in this process; generators
    are left as they were. Raises `DataError` when the data has less than `size` samples, cannot be read, or
    can be read only once: a stream that is its own iterator and is not built anew.
    """
    whole = replace(job, batch_size=size or job.batch_size, drop_last=True)
    dataset = build_dataset(job.data, job.seed)
    with preserved_draws():
        read = (
            _from_stream(dataset, whole) if is_stream(dataset, "Job(data=...)") else _from_map(dataset, whole)
        )
        batches: list[Any] = []
        for batch in islice(read, count):
            if isinstance(batch, ReadFailure):
                raise batch.to_error()
            batches.append(batch)
        return batches


def _from_map(dataset: Any, job: Job) -> Iterator[Any]:
    if len(dataset) < job.batch_size:
        raise DataError(
            f"The dataset has {len(dataset)} samples, and the batches to look at {job.batch_size}. Use a smaller batch_size or more data."
        )
    batches = Batches(job, len(dataset))
    source = ChunkSource(dataset, job)
    step = 0
    while True:
        epoch, indices = batches.of(step)
        yield source[ReadRequest(step, 0, epoch, indices)]
        step += 1


def _from_stream(dataset: Any, job: Job) -> Iterator[Any]:
    if (
        not isinstance(dataset, IterableDataset)
        and iter(dataset) is dataset
        and build_dataset(job.data, job.seed) is dataset
    ):
        raise DataError(
            f"Job(data=...) returns the same {type(dataset).__name__} each time, which can be read only once, and looking at its first samples would take them "
            "from training. Build it in the function, or make it an IterableDataset."
        )
    collate = Collation(job)
    for step, batch in enumerate(stream_batches(dataset, job)):
        if isinstance(batch, ReadFailure):
            yield batch
            return
        names, samples = zip(*batch, strict=True)
        yield collate(list(samples), step, 0, names)

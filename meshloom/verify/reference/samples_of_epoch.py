"""The samples of one global batch after another, as one device reads them: a second, independent
implementation that the plan's own is checked against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.random import derive, preserved_draws, sample_order, sample_seed, seed_everything


def read_batches(job: Job, start: int = 0) -> Iterator[list[Any]]:
    """The samples of one global batch after another, forever: (seed, epoch, index) determines what is
    read. start: number of the first."""
    seed_everything(derive(job.seed, "data"))
    dataset = job.data()
    return (
        islice(_iterated(job, dataset), start, None)
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        else _indexed(job, dataset, start)
    )


def _indexed(job: Job, dataset: Any, first: int) -> Iterator[list[Any]]:
    if len(dataset) < (job.batch_size if job.drop_last else 1):
        raise DataError(
            f"The dataset has {len(dataset)} samples, and a batch {job.batch_size}. Use a smaller batch_size or more data."
        )
    passed = 0
    for epoch in count():
        order = sample_order(job.seed, epoch, len(dataset), job.shuffle)
        assert len(set(order)) == len(dataset), (
            "an epoch's order must be a permutation: the plan shares this function, so nobody else would notice"
        )
        for start in range(0, len(order), job.batch_size):
            indices = order[start : start + job.batch_size]
            if len(indices) < job.batch_size and job.drop_last:
                continue
            passed += 1
            if passed > first:
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(epoch)
                yield [_read(job, epoch, index, lambda index=index: dataset[index]) for index in indices]


def _iterated(job: Job, dataset: Any) -> Iterator[list[Any]]:
    for epoch in count():
        batches, batch = 0, list[Any]()
        for sample in _stream(job, dataset, epoch):
            batch.append(sample)
            if len(batch) == job.batch_size:
                yield batch
                batches, batch = batches + 1, []
        if batch and not job.drop_last:
            yield batch
        elif not batches:
            raise DataError(
                f"Epoch {epoch} of the iterable data has less than one batch of {job.batch_size} samples. Use a smaller one."
            )


def _stream(job: Job, dataset: Any, epoch: int) -> Iterator[Any]:
    with preserved_draws():
        seed_everything(derive(job.seed, "stream", epoch))
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        source = iter(dataset)
    for position in count():
        sample = _read(job, epoch, position, lambda: next(source, _END))
        if sample is _END:
            return
        yield sample


_END = object()


def _read(job: Job, epoch: int, index: int, read: Any) -> Any:
    with preserved_draws():
        seed_everything(sample_seed(job.seed, epoch, index))
        return read()

"""The samples of one global batch after another, as one device reads them: a second, independent
implementation that the plan's own is checked against."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.modules.held_generators import Generator, held_generators
from meshloom.core.random import derive, preserved_draws, sample_order, sample_seed, seed_everything


def read_batches(job: Job, start: int = 0) -> Iterator[list[Any]]:
    """The samples of one global batch after another, forever: (seed, epoch, index) determines what is
    read. start: number of the first."""
    dataset = _dataset(job)
    if _is_indexed(dataset):
        return _indexed(job, dataset, start)
    return islice(_iterated(job, dataset), start, None)


def _dataset(job: Job) -> Any:
    seed_everything(derive(job.seed, "data"))
    return job.data()


def _is_indexed(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


def batches_of_first_epoch(job: Job, most_samples: int, most_seconds: float) -> int | None:
    """Batches of the first epoch of iterable data; None if that does not end within so many samples and seconds, or data is
    not iterable."""
    began, samples = time.monotonic(), 0
    with preserved_draws():
        dataset = _dataset(job)
        if _is_indexed(dataset):
            return None
        for samples, _ in enumerate(_stream(job, dataset, 0), start=1):
            if samples > most_samples or time.monotonic() - began > most_seconds:
                return None
    return samples // job.batch_size if job.drop_last else -(-samples // job.batch_size)


def _indexed(job: Job, dataset: Any, first: int) -> Iterator[list[Any]]:
    if len(dataset) < (job.batch_size if job.drop_last else 1):
        raise DataError(
            f"The dataset has {len(dataset)} samples, and a batch {job.batch_size}. Use a smaller batch_size or more data."
        )
    passed, held = 0, held_generators(dataset)
    for epoch in count():
        order = sample_order(job.seed, epoch, len(dataset), job.shuffle)
        assert len(set(order)) == len(dataset), (
            "an epoch's order must be a permutation: the plan shares this function, so nobody else would notice"
        )
        for indices in _in_batches(job, order):
            passed += 1
            if passed > first:
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(epoch)
                yield [
                    _read(job, held, epoch, index, lambda index=index: dataset[index]) for index in indices
                ]


def _iterated(job: Job, dataset: Any) -> Iterator[list[Any]]:
    for epoch in count():
        batch = None
        for batch in _in_batches(job, _stream(job, dataset, epoch)):
            yield batch
        if batch is None:
            raise DataError(
                f"Epoch {epoch} of the iterable data has less than one batch of {job.batch_size} samples. Use a smaller one."
            )


def _in_batches(job: Job, samples: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == job.batch_size:
            yield batch
            batch = []
    if batch and not job.drop_last:
        yield batch


def _stream(job: Job, dataset: Any, epoch: int) -> Iterator[Any]:
    held = held_generators(dataset)
    with preserved_draws():
        seed_reading(held, derive(job.seed, "stream", epoch))
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        source = iter(dataset)
    for position in count():
        sample = _read(job, held, epoch, position, lambda: next(source, _END))
        if sample is _END:
            return
        yield sample


_END = object()


def _read(job: Job, held: Mapping[str, Generator], epoch: int, index: int, read: Any) -> Any:
    with preserved_draws():
        seed_reading(held, sample_seed(job.seed, epoch, index))
        return read()


def seed_reading(held: Mapping[str, Generator], value: int) -> None:
    """The global generators, and those that the dataset holds, by their paths."""
    seed_everything(value)
    for path, each in held.items():
        seed = derive(value, path)
        if isinstance(each, numpy.random.Generator):
            each.bit_generator.state = type(each.bit_generator)(seed).state
        elif isinstance(each, torch.Generator):
            each.manual_seed(seed)
        else:
            each.seed(seed if isinstance(each, random.Random) else seed % 2**32)

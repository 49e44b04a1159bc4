"""The first batches of a job's data, and some of its samples, read without any effect on a run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.random import preserved_draws
from meshloom.data.job_data import build_dataset, is_iterable
from meshloom.data.map_data import Batches, ChunkSource, ReadRequest
from meshloom.data.reading import Collation, ReadFailure
from meshloom.data.stream_data import stream_batches

T = TypeVar("T")


def first_batches(job: Job, number: int, size: int | None = None) -> list[Any]:
    """The first `number` batches of `size` samples (default: the global batch), collated, over enough epochs.

    Samples, their order and their draws are those of training; batches of the default size are too, up to the
    first short one, which is left out here. An epoch of fewer than `size` samples repeats them until the batch is
    full. The data is built once more and read in this process; generators are restored. Raises `DataError` if no
    step of training has a batch, the data cannot be read, or is an iterator that `data` returns each time, which can be
    read only once.
    """
    with closing(reading_first(job, build_dataset(job.data, job.seed), size or job.batch_size)) as batches:
        return list(islice(batches, number))


def reading_first(job: Job, dataset: Any, size: int) -> Generator[Any]:
    """The same batches as they are read of `dataset`, one after another; generators are restored as it is closed."""
    with preserved_draws():
        read = _from_stream if is_iterable(dataset, "Job(data=...)") else _from_map
        for batch in read(dataset, job, size):
            if isinstance(batch, ReadFailure):
                raise batch.to_error()
            yield batch


@dataclass(frozen=True, kw_only=True)
class SomeSamples:
    """length: None of a stream. samples: what was made of each by name, once for each reading of two; those that could not be read
    are left out. is_whole: whether all could be read."""

    length: int | None
    samples: dict[str, list[str]]
    is_whole: bool


def some_samples(
    build: Callable[[], Any], job: Job, where: str, make: Callable[[Any], str], *, epoch: int = 0
) -> SomeSamples | None:
    """The length of the data that `build` returns, and what `make` makes of its first, middle and last sample, of a stream of
    its first three, each read twice with the draws of `epoch`.

    The data is built for this, of a stream for each reading, and read in this process; generators are restored. None: `build` returns
    the same iterator each time, which can be read only once. Raises as `is_iterable` does. where: what builds it.
    """
    alone = replace(job, batch_size=1, drop_last=False, collate=_one)
    dataset = build_dataset(build, job.seed)
    with preserved_draws():
        if not is_iterable(dataset, where):
            length = len(dataset)
            one, two = (_made(_of_map(dataset, length, alone, epoch), make) for _ in range(2))
        else:
            length, again = None, build_dataset(build, job.seed)
            if again is dataset and _reads_once(dataset):
                return None
            one, two = (_made(_of_stream(each, alone), make) for each in (dataset, again))
    samples = {name: [made, again] for name, made in one.items() if made and (again := two.get(name))}
    return SomeSamples(length=length, samples=samples, is_whole=len(samples) == max(len(one), len(two)))


def _made(named: Iterator[tuple[str, Any]], make: Callable[[Any], str]) -> dict[str, str | None]:
    """What is made of each sample at once, as a dataset may use its memory for the next one; None: it could not be read."""
    return {name: None if isinstance(sample, ReadFailure) else make(sample) for name, sample in named}


def _of_map(dataset: Any, length: int, job: Job, epoch: int) -> Iterator[tuple[str, Any]]:
    source = ChunkSource(dataset, job)
    for index in sorted({0, length // 2, length - 1}) if length else ():
        yield str(index), source[ReadRequest(0, 0, epoch, [index])]


def _of_stream(dataset: Any, job: Job) -> Iterator[tuple[str, Any]]:
    for number, batch in enumerate(islice(stream_batches(dataset, job), 3)):
        if isinstance(batch, ReadFailure):
            if batch.error is not None:  # else it has no more
                yield str(number), batch
            return
        yield batch[0]


def _one(samples: list[Any]) -> Any:
    return samples[0]


def _reads_once(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset) and iter(dataset) is dataset


def _from_map(dataset: Any, job: Job, size: int) -> Iterator[Any]:
    num_samples = len(dataset)
    Batches(job, num_samples)  # raises what training would
    full_batches = replace(job, batch_size=min(size, num_samples), drop_last=True)
    batches = Batches(full_batches, num_samples)
    source = ChunkSource(dataset, job)
    for step in count():
        epoch, indices = batches.of(step)
        yield source[ReadRequest(step, 0, epoch, _repeated(indices, size))]


def _from_stream(dataset: Any, job: Job, size: int) -> Iterator[Any]:
    if _reads_once(dataset) and build_dataset(job.data, job.seed) is dataset:
        raise DataError(
            f"Job(data=...) returns the same {type(dataset).__name__} each time, which can be read only once: its first samples would be missing "
            "in training. Build it in the function, or make it an IterableDataset."
        )
    collate = Collation(job)
    step, was_full = 0, False
    for batch in stream_batches(dataset, replace(job, batch_size=size)):
        if isinstance(batch, ReadFailure):
            yield batch
            return
        is_rest = was_full and len(batch) < size  # of an epoch that had full ones
        was_full = len(batch) == size
        if not is_rest:
            names, samples = zip(*_repeated(batch, size), strict=True)
            yield collate(list(samples), step, 0, names)
            step += 1


def _repeated(values: Sequence[T], size: int) -> list[T]:
    """The values from the beginning, again and again, `size` of them."""
    return list(islice(cycle(values), size))

"""The samples of a trainer's `DataLoader` in the trainer's own order, and their batches.

batches of 2, gradients accumulated over 2 of them, five samples:

    microbatch    0 0   1 1 | 2
    step          0         | 1       the last accumulation of an epoch may be short

A step of the job is the samples of its microbatches. Where there are several, `GroupedCollate` makes a batch of each, as
the trainer does, or of the part of it that a chunk holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from meshloom.core.errors import DataError, JobError
from meshloom.core.random import generators, preserved_draws, put_generators


@dataclass(frozen=True)
class AccumulatedSample:
    """A sample of microbatch `number` of its epoch, which has `size` samples and is one of `microbatches` of its step."""

    sample: Any
    number: int
    size: int
    microbatches: int


@dataclass(frozen=True)
class EvaluationSample:
    """A sample of batch `number` of an evaluation, which has `size` samples and, where the trainer counts them, `items` labels."""

    sample: Any
    number: int
    size: int
    items: int | None


class LoaderOrder:
    """The microbatches of each epoch, as the trainer's own sampler gives them.

    loader: a DataLoader with a batch sampler. evaluations: how many there are in an epoch. A sampler that draws from
    torch's default generator finds it as it is now, and later as the loaders of epochs and evaluations before have left it.
    """

    def __init__(self, loader: Any, batch_size: int, evaluations: Callable[[int], int]) -> None:
        self._loader, self._batch_size, self._evaluations = loader, batch_size, evaluations
        self._before = [generators()]  # of each epoch
        self._known: dict[int, list[list[int]]] = {}
        self.num_samples = sum(map(len, self.of(0)))

    def of(self, epoch: int) -> list[list[int]]:
        """Indices of the dataset, by microbatch. Raises `JobError` for batches of several sizes."""
        with preserved_draws():
            for each in range(min(epoch, len(self._before) - 1), epoch + 1):
                if each not in self._known:
                    self._known = {**dict(list(self._known.items())[-1:]), each: self._drawn(each)}
        return self._known[epoch]

    def _drawn(self, epoch: int) -> list[list[int]]:
        put_generators(self._before[epoch])
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        if self._loader.generator is None:
            _begin_iterator()
        batches = [list(batch) for batch in self._loader.batch_sampler]
        for _ in range(self._evaluations(epoch)):
            _begin_iterator()
        if len(self._before) == epoch + 1:
            self._before.append(generators())
        sizes = [len(batch) for batch in batches]
        whole = all(size == self._batch_size for size in sizes[:-1]) and sizes[-1:] <= [self._batch_size]
        if not batches or not whole or (epoch and sum(sizes) != self.num_samples):
            raise JobError(
                f"The trainer's sampler gives batches of {sorted(set(sizes))} samples in epoch {epoch}, and a job has steps of one size. Use a sampler with "
                f"batches of {self._batch_size}, of which the last may be shorter."
            )
        return batches


class LoaderSamples(Dataset[Any]):
    """A map-style dataset whose sample `position` of an epoch is the one that the trainer reads there. accumulation: the
    trainer's microbatches of a step."""

    def __init__(self, dataset: Any, order: LoaderOrder, batch_size: int, accumulation: int) -> None:
        self._dataset, self._order = dataset, order
        self._batch_size, self._accumulation = batch_size, accumulation
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return self._order.num_samples

    def __getitem__(self, position: int) -> Any:
        batches = self._order.of(self._epoch)
        number, place = divmod(position, self._batch_size)
        sample = self._dataset[batches[number][place]]
        if self._accumulation == 1:
            return sample
        first = number - number % self._accumulation
        of_step = min(self._accumulation, len(batches) - first)
        return AccumulatedSample(sample, number, len(batches[number]), of_step)


class LoaderStream(IterableDataset[Any]):
    """An iterable dataset in steps of the trainer's. has_length: whether the trainer knows where an epoch ends."""

    def __init__(self, dataset: Any, batch_size: int, accumulation: int, *, has_length: bool) -> None:
        self._dataset, self._batch_size, self._accumulation = dataset, batch_size, accumulation
        self._has_length = has_length

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._accumulation == 1:
            yield from self._dataset
            return
        first, waiting = 0, list[Any]()
        for sample in self._dataset:
            waiting.append(sample)
            if len(waiting) == self._batch_size * self._accumulation:
                yield from self._step(first, waiting)
                first, waiting = first + self._accumulation, []
        if waiting:
            yield from self._step(first, waiting)

    def _step(self, first: int, samples: list[Any]) -> Iterator[AccumulatedSample]:
        size = self._batch_size
        microbatches = -(-len(samples) // size)
        if microbatches < self._accumulation and not self._has_length:
            raise DataError(
                f"the stream ends after {microbatches} of the {self._accumulation} microbatches of a step, whose gradients the trainer adds to those of the next "
                "epoch's first step. Give the dataset a __len__, with which they are a step of their own, or whole steps in each epoch."
            )
        for place, sample in enumerate(samples):
            number = place // size
            yield AccumulatedSample(
                sample, first + number, min(size, len(samples) - number * size), microbatches
            )


class EvaluationSamples(Dataset[Any]):
    """The samples that the trainer evaluates, in its order. loader: a DataLoader. batches: indices of its
    dataset. count: of a batch, the number of its labels, where the trainer counts them."""

    def __init__(
        self, loader: Any, batches: list[list[int]], count: Callable[[Any], int | None] | None
    ) -> None:
        self._loader, self._batches, self._count = loader, batches, count
        self._places = [(number, index) for number, batch in enumerate(batches) for index in batch]
        self._counted: tuple[int, int | None] = (-1, None)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, position: int) -> EvaluationSample:
        number, index = self._places[position]
        if self._count is not None and self._counted[0] != number:
            samples = [self._loader.dataset[each] for each in self._batches[number]]
            self._counted = number, self._count(self._loader.collate_fn(samples))
        items = self._counted[1] if self._count is not None else None
        return EvaluationSample(self._loader.dataset[index], number, len(self._batches[number]), items)


@dataclass(frozen=True)
class GroupedCollate:
    """The job's `collate`: of training, the trainer's own batch, or, of steps of several microbatches and of evaluations, a
    list with one for each. training, evaluation: the trainer's collators."""

    training: Callable[[list[Any]], Any]
    evaluation: Callable[[list[Any]], Any] | None = None

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], AccumulatedSample | EvaluationSample):
            return self.training(samples)
        return [self._group(list(group)) for _, group in groupby(samples, lambda each: each.number)]

    def _group(self, group: list[Any]) -> dict[str, Any]:
        """inputs: of the model. part: samples here, and of the whole microbatch; then microbatches of the step, or labels
        of the batch (-1: they are not counted); int64 [3]."""
        samples, first = [each.sample for each in group], group[0]
        if isinstance(first, AccumulatedSample):
            return {"inputs": self.training(samples), "part": _part(group, first.microbatches)}
        assert self.evaluation is not None
        items = -1 if first.items is None else first.items
        return {"inputs": self.evaluation(samples), "part": _part(group, items)}


def size_of(batches: Sequence[Sequence[int]]) -> int | None:
    """Samples of each batch but the last, which may have fewer; None: they have several sizes."""
    sizes = [len(each) for each in batches]
    return sizes[0] if set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0] else None


def _part(group: list[Any], more: int) -> torch.Tensor:
    return torch.tensor([len(group), group[0].size, more])


def _begin_iterator() -> None:
    """Draw what an iterator over a loader draws when it begins."""
    torch.empty((), dtype=torch.int64).random_()

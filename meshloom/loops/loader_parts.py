"""The parts of a DataLoader that give a replica's share of each global batch: whoever makes a loader of them shares."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from meshloom.core.errors import DataError
from meshloom.core.modules.held_generators import held_generators
from meshloom.core.random import derive, draws_of, sample_seed, seed_draws
from meshloom.data.dataset_generators import DatasetGenerators
from meshloom.loops.data_place import DataPlace, put_states, states_of
from meshloom.loops.share import Sharer, rows, stretch
from meshloom.loops.taken_shares import TakenShare, saw_whole, took
from meshloom.train.rank_comparison import sample_digest


class BatchPlace(NamedTuple):
    """Batch `number` of an epoch, of which a replica takes `taken`. seed: of the loader's draws."""

    seed: int
    epoch: int
    number: int
    taken: TakenShare


class PlacedList(list[Any]):
    """The indices of a batch, then its samples, as they go from a batch sampler to what collates them."""

    def __init__(self, values: Any, place: BatchPlace) -> None:
        super().__init__(values)
        self.place = place


class SharedBatches(BatchSampler):
    """The batches of `place.order`, the script's own batch sampler, of which a replica gets its share. whole: all of each, since its rows are
    taken after collating.

    One that is made from the parts of ours knows what it samples, and not what the script has by now: shares are told from each other by
    their rows.
    """

    def __init__(self, place: DataPlace, sharer: Sharer, *, whole: bool) -> None:
        self.place = place
        self._sharer, self._whole = sharer, whole

    @property
    def sampler(self) -> Any:
        """The script's."""
        return self.place.order.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.place.order.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "place" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.place.order, name)

    def __len__(self) -> int:
        return len(self.place.order)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches(own=self.place.own)

    def _batches(self, *, own: bool) -> Iterator[list[Any]]:
        with self.place.beginning() as (epoch, skipped):
            batches = enumerate(self.place.order)
            deque(islice(batches, skipped), maxlen=0)
            first = list(islice(batches, 1))  # samplers draw as they give their first
        seen = set[TakenShare]() if own else self._expected()
        for number, indices in chain(first, batches):
            saw_whole(lambda indices=indices: sample_digest(list(indices)))
            taken = self._sharer.of(len(indices))
            if not own:
                seen.add(taken)
                _check_told_by_rows(seen, taken)
                took(taken)
                self.place.hand()
            part = slice(None) if self._whole else stretch(taken)
            yield PlacedList(list(indices)[part], BatchPlace(self.place.seed, epoch, number, taken))
        if not own:
            self.place.end()

    def _expected(self) -> set[TakenShare]:
        """The shares of an epoch's batches and of its last one, where those are known."""
        order, sharer = self.place.order, self._sharer
        try:
            sizes = [min(order.batch_size, len(order.sampler)), len(order.sampler) % order.batch_size]
        except (AttributeError, TypeError):  # a sampler of batches, or without end
            return set()
        found = {sharer.of(size) for size in sizes[: 1 if order.drop_last else 2] if size}
        for taken in found:
            _check_told_by_rows(found, taken)
        return found


class _Around:
    """A data set around the script's, whose attributes are read and written through it: a `worker_init_fn` gives each worker a part."""

    def __init__(self, samples: Any, **own: Any) -> None:
        self.__dict__.update(own, samples=samples, _draws=_SampleDraws(samples))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "samples" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.samples, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.samples, name, value)

    def __len__(self) -> int:
        return len(self.samples)


class SharedSamples(_Around, Dataset[Any]):
    """The script's data set, whose draws belong to (seed, epoch, index), in whichever process it is read."""

    samples: Any
    _draws: _SampleDraws

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if not isinstance(indices, PlacedList):
            return [self.samples[each] for each in indices]
        seed, epoch, number, _ = indices.place
        found: list[Any] = []
        with self._draws.apart():
            for index in indices:  # which a sampler may give again in another batch
                self._draws.seed(derive(sample_seed(seed, epoch, index), number))
                found.append(self.samples[index])
        return PlacedList(found, indices.place)


class SharedStream(_Around, IterableDataset[Any]):
    """The script's stream, read whole on every rank. epoch: of the next reading. position: of the next sample of this one.

    Draws belong to (seed, epoch, position), where workers are taken to have every n-th sample.
    """

    samples: Any
    place: DataPlace
    epoch: int
    reading: int
    position: int
    _draws: _SampleDraws

    def __init__(self, samples: Any, place: DataPlace) -> None:
        super().__init__(samples, place=place, epoch=0, reading=0, position=0)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, self.epoch = self.epoch, self.epoch + 1
        if worker and not self.place.own:  # nobody counts the epochs of a loader that others made
            epoch = derive(worker.seed - worker.id, epoch)
        self.reading, self.position = epoch, first
        with self._draws.apart():
            self._draws.seed(derive(self.place.seed, "stream", epoch))
            samples = iter(self.samples)
        while True:
            with self._draws.apart():
                self._draws.seed(sample_seed(self.place.seed, epoch, self.position))
                sample = next(samples, _END)
            if sample is _END:
                return
            self.position += every
            yield sample


class Carried(NamedTuple):
    """A batch on its way to a loader of ours, with the share that it is. whole: of a stream, the digest of all samples of the first batches."""

    batch: Any
    taken: TakenShare
    whole: str | None = None

    def pin_memory(self) -> Carried:
        """For torch, which asks what it does not know."""
        return self._replace(batch=pin_memory(self.batch))


class SharedCollate:
    """The script's `collate_fn`: of the share's samples, or with `whole` of all, whose rows are taken then. stream: where samples come from; None: from
    `SharedBatches`, which have taken the share."""

    def __init__(
        self, collate: Callable[[list[Any]], Any], sharer: Sharer, stream: SharedStream | None, *, whole: bool
    ) -> None:
        self.collate, self._sharer, self._stream, self._whole = collate, sharer, stream, whole
        self._carries, self._first = False, _FIRST_OF_STREAM

    def carrying(self) -> SharedCollate:
        """The same for a loader of ours, which unpacks what it gets."""
        changed = copy.copy(self)
        changed._carries = True
        return changed

    def __call__(self, samples: list[Any]) -> Any:
        stream, whole = self._stream, None
        if stream is not None:
            key = (stream.place.seed, "collate", stream.reading, stream.position)
            taken = self._sharer.of(len(samples))
            own = samples if self._whole else samples[stretch(taken)]
            if self._first and not stream.reading:
                self._first, whole = self._first - 1, sample_digest(samples)
            if not self._carries:
                _check_even(taken)
        elif isinstance(samples, PlacedList):
            seed, epoch, number, taken = samples.place
            key, own = (seed, "collate", epoch, number), list(samples)
        else:
            return self.collate(samples)
        with draws_of(derive(*key)):
            batch = self.collate(own)
        if self._whole and self._sharer.replicas > 1:
            batch = rows(batch, taken, 0, len(samples))
        if self._carries:
            return Carried(batch, taken, whole)
        took(taken, batch)  # in a worker nobody hears of it
        return batch


class _SampleDraws:
    """The generators that a data set's samples may draw from: the global ones, and its own."""

    def __init__(self, samples: Any) -> None:
        self._held, self._generators = held_generators(samples), DatasetGenerators(samples)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context whose draws leave the generators of this process as they were: its sampler may have the data set's."""
        kept = states_of(self._held)
        with draws_of(0):
            yield
        put_states(self._held, kept)

    def seed(self, value: int) -> None:
        """All of them."""
        seed_draws(value)
        if self._held:
            self._generators.seed(value)


def _check_told_by_rows(seen: Set[TakenShare], taken: TakenShare) -> None:
    """Raise `DataError` where a replica has as many rows of this share as of another, which counts otherwise."""
    for other in seen:
        for replica in range(len(taken.sizes)):
            one, two = TakenShare(taken.sizes, replica), TakenShare(other.sizes, replica)
            if one.rows == two.rows and one.weight != two.weight:
                raise _untold(taken)


def _check_even(taken: TakenShare) -> None:
    """Raise `DataError` in a worker for a share whose size the training process does not hear of."""
    if get_worker_info() is not None and not taken.is_even:
        raise _untold(taken)


def _untold(taken: TakenShare) -> DataError:
    return DataError(
        f"A library has made a loader of its own from this one's parts, and reads ahead, so which batch the script has is not known; one of {sum(taken.sizes)} samples "
        f"is uneven over dp={len(taken.sizes)} ({'+'.join(map(str, taken.sizes))}). Give ml.loader the loader that the library has prepared, or drop_last=True."
    )


_END = object()
_FIRST_OF_STREAM = 2  # batches of each process

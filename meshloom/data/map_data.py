"""Map-style data: the samples of a step are a function of (seed, step), so a position is a step.

Each replica reads its own samples only. A sample's draws (augmentation) are keyed by (seed, epoch, index), so
they do not depend on the rank or worker that reads it, nor on a resume. A dataset that has `set_epoch` is told
the epoch before its samples are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import sample_order, sample_seed, seed_draws
from meshloom.data.chunks import Chunk, Reader, share_of, split_batch
from meshloom.data.dataset_generators import DatasetGenerators
from meshloom.data.reading import Collation, ReadFailure
from meshloom.data.reading_ahead import read_ahead
from meshloom.data.shares import Shares

EVALUATION = -1  # the epoch of draws while evaluation data is read


class ReadRequest(NamedTuple):
    """Samples `indices` of the dataset, as chunk `chunk` of `step`."""

    step: int
    chunk: int
    epoch: int
    indices: list[int]


class ChunkSource(Dataset[Any]):
    """A dataset of chunks: each item is a collated chunk, or a `ReadFailure`."""

    def __init__(self, dataset: Any, job: Job) -> None:
        self._dataset = dataset
        self._seed = job.seed
        self._collate, self._generators = Collation(job), DatasetGenerators(dataset)

    def __getitem__(self, request: ReadRequest) -> Any:
        samples: list[Any] = []
        if request.epoch != EVALUATION and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(request.epoch)
        for index in request.indices:
            seed = sample_seed(self._seed, request.epoch, index)
            seed_draws(seed)
            if self._generators.names:
                self._generators.seed(seed)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                return ReadFailure.of(f"Reading sample {index} (step {request.step})", error)
        return self._collate(samples, request.step, request.chunk, request.indices)


class Batches:
    """The global batch of each step, as indices of a dataset. Raises `DataError` if an epoch has no batch.

    An epoch's order is cut into one batch after another; what is left at its end is a short batch, or dropped. per_epoch: steps of one.
    """

    def __init__(self, job: Job, num_samples: int) -> None:
        self._job = job
        self._num_samples = num_samples
        if not num_samples:
            raise DataError("The dataset is empty. Job(data=...) must build one with samples.")
        if job.drop_last and num_samples < job.batch_size:
            raise DataError(
                f"The dataset has {num_samples} samples, and drop_last=True drops the short batch of them (batch_size={job.batch_size}). "
                f"Use batch_size={num_samples} or less, or drop_last=False."
            )
        self._order: tuple[int, list[int]] = (-1, [])
        full, rest = divmod(num_samples, job.batch_size)
        self.per_epoch = full + (1 if rest and not job.drop_last else 0)

    def size(self, step: int) -> int:
        """Samples of the batch of `step`; the last batch of an epoch may be short."""
        size = self._job.batch_size
        return min(size, self._num_samples - step % self.per_epoch * size)

    def of(self, step: int) -> tuple[int, list[int]]:
        """The epoch of `step`, and the indices of its batch in order."""
        epoch, number = divmod(step, self.per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, sample_order(self._job.seed, epoch, self._num_samples, self._job.shuffle)
        start = number * self._job.batch_size
        return epoch, self._order[1][start : start + self._job.batch_size]


class MapReader(Reader):
    """The chunks of one replica, read by one loader."""

    def __init__(
        self, dataset: Any, num_samples: int, job: Job, plan: Plan, shares: Shares, replica: int,
        start_step: int, stop_step: int,
    ) -> None:  # fmt: skip
        self._source = ChunkSource(dataset, job)
        self._num_samples = num_samples
        self._batches = Batches(job, num_samples)
        self._num_workers = job.num_workers
        self._measures = plan.shares == "measured"
        # of batches of a size, under some shares: the number, place and size of each of this replica's chunks
        self._cuts: dict[Any, list[tuple[int, slice, int]]] = {}
        self._plan, self._shares, self._replica, self._stop_step = plan, shares, replica, stop_step
        last = (start_step // self._batches.per_epoch + 1) * self._batches.per_epoch - 1
        for each in (start_step, last):  # the last batch of an epoch may be short
            if each < stop_step:
                plan.check_batch(self._batches.size(each))
        self._seek(start_step)

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def read(self, step: int) -> list[Chunk]:
        assert step < self._stop_step, f"step {step} of a run that ends before step {self._stop_step}"
        if step != self._next_step:
            self._seek(step)
        size = self._batches.size(step)
        chunks: list[Chunk] = []
        for index, _, samples in self._cut(step, size):
            data = next(self._items) if samples else None
            chunks.append(Chunk(step, size, index, samples, data))
        self._next_step = step + 1
        return chunks

    def close(self) -> None:
        self._items.close()

    def _seek(self, step: int) -> None:
        if hasattr(self, "_items"):
            self.close()
        self._next_step = step
        self._items = read_ahead(self._source, self._num_workers, self._requests(step))

    def _requests(self, start_step: int) -> Iterator[ReadRequest]:
        """The chunks to read from `start_step` to the end of the run."""
        for step in range(start_step, self._stop_step):
            epoch, indices = self._batches.of(step)
            for index, own, samples in self._cut(step, len(indices)):
                if samples:
                    yield ReadRequest(step, index, epoch, indices[own])

    def _cut(self, step: int, num_samples: int) -> list[tuple[int, slice, int]]:
        shares = self._shares.of(step) if self._measures else ()
        if (num_samples, shares) not in self._cuts:
            ranges = share_of(self._replica, split_batch(num_samples, self._plan, shares), self._plan)
            self._cuts[num_samples, shares] = [(each.index, slice(each.start, each.stop), each.samples) for each in ranges]  # fmt: skip
        return self._cuts[num_samples, shares]


def map_chunks(
    dataset: Any, job: Job, plan: Plan, replica: int, shares: Sequence[int], num_batches: int | None
) -> Iterator[Chunk]:
    """The nonempty chunks of `replica` of one pass, in order. Arguments: of `evaluation_chunks`."""
    size = job.evaluation_batch_size
    starts = range(0, len(dataset), size)[:num_batches]
    batches = [range(start, min(start + size, len(dataset))) for start in starts]
    requests = [
        ReadRequest(step, cut.index, EVALUATION, list(batch[cut.start : cut.stop]))
        for step, batch in enumerate(batches)
        for cut in share_of(replica, split_batch(len(batch), plan, shares), plan)
        if cut.samples
    ]
    items = read_ahead(ChunkSource(dataset, job), min(job.num_workers, len(requests)), requests)
    return (
        Chunk(request.step, len(batches[request.step]), request.chunk, len(request.indices), data)
        for request, data in zip(requests, items, strict=True)
    )

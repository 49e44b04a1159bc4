"""Iterable data: rank 0 reads the stream and scatters each global batch, so that nothing is read twice.

    rank 0   read a batch, split it, collate every chunk -> scatter -> chunks 0 .. m-1
    rank r                                               -> scatter -> chunks r*m .. r*m + m-1

When the stream ends, the next epoch begins with a new `iter()`, after `set_epoch(epoch)` if the dataset has
that. A position in a stream is a number of batches. Seeking reads and discards from the beginning, each
sample under its own seed, since a stream has no other notion of position.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from meshloom.comm.group import Group
from meshloom.comm.objects import scatter_objects
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import derive, sample_seed, seed_draws
from meshloom.data.chunks import Chunk, Reader, split_batch
from meshloom.data.dataset_generators import DatasetGenerators
from meshloom.data.reading import Collation, ReadFailure
from meshloom.data.reading_ahead import read_ahead
from meshloom.data.shares import Shares

Sample = tuple[str, Any]  # its name in errors, and the sample


class StepSource(IterableDataset[Any]):
    """A stream of steps: each item is the list of all chunks of a step, or a `ReadFailure`."""

    def __init__(
        self, dataset: Any, job: Job, plan: Plan, shares: Shares, start_step: int, stop_step: int
    ) -> None:
        self._dataset, self._job, self._plan, self._shares = dataset, job, plan, shares
        self._steps = range(start_step, stop_step)
        self._collate = Collation(job)

    def __iter__(self) -> Iterator[list[Chunk] | ReadFailure]:
        batches = stream_batches(self._dataset, self._job)
        for step, batch in zip(self._steps, islice(batches, self._steps.start, None), strict=False):
            if isinstance(batch, ReadFailure):
                yield batch
                return
            chunks: list[Chunk] = []
            for cut in split_batch(len(batch), self._plan, self._shares.of(step)):
                names, samples = zip(*batch[cut.start : cut.stop], strict=True) if cut.samples else ((), ())
                data = self._collate(list(samples), step, cut.index, names) if cut.samples else None
                if isinstance(data, ReadFailure):
                    yield data
                    return
                chunks.append(Chunk(step, len(batch), cut.index, cut.samples, data))
            yield chunks


def stream_batches(dataset: Any, job: Job) -> Iterator[list[Sample] | ReadFailure]:
    """The global batches, epoch after epoch, without end; a `ReadFailure` is the last item."""
    step, generators = 0, DatasetGenerators(dataset)
    for epoch in count():
        position, before = 0, step
        batch: list[Sample] = []
        seed = derive(job.seed, "stream", epoch)
        seed_draws(seed)
        generators.seed(seed)
        try:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            samples = iter(dataset)
        except Exception as error:
            yield ReadFailure.of(f"Starting epoch {epoch} of the stream", error)
            return
        while True:
            seed = sample_seed(job.seed, epoch, position)
            seed_draws(seed)
            generators.seed(seed)
            try:
                batch.append((f"{position} of epoch {epoch}", next(samples)))
            except StopIteration:
                break
            except Exception as error:
                yield ReadFailure.of(f"Reading sample {position} of epoch {epoch} of the stream", error)
                return
            position += 1
            if len(batch) == job.batch_size:
                yield batch
                batch, step = [], step + 1
        if batch and not job.drop_last:
            yield batch
            step += 1
        elif step == before:
            yield ReadFailure(_ran_dry(epoch, position, job))
            return


def _ran_dry(epoch: int, num_samples: int, job: Job) -> str:
    if num_samples:
        return (
            f"Epoch {epoch} of the stream has {num_samples} samples, and drop_last=True drops the short batch of them (batch_size={job.batch_size}). "
            f"Use batch_size={num_samples} or less, or drop_last=False."
        )
    if epoch:
        return (
            f"The stream has no samples in epoch {epoch}: it ran dry after epoch {epoch - 1}. "
            "Its __iter__ must start anew each time; a generator starts once."
        )
    return "The stream has no samples. Job(data=...) must build one that yields some."


class StreamReader(Reader):
    """The chunks of one replica, scattered by rank 0 of `group`, which alone opens the stream."""

    def __init__(
        self,
        dataset: Any,
        job: Job,
        plan: Plan,
        shares: Shares,
        group: Group,
        start_step: int,
        stop_step: int,
    ) -> None:
        if job.num_workers > 1:
            raise JobError(
                f"num_workers={job.num_workers} would read every sample of an iterable dataset {job.num_workers} times. "
                "Use num_workers=1, which reads ahead in a process of its own, or a map-style dataset."
            )
        if job.num_workers and plan.shares == "measured":
            raise JobError(
                f"num_workers={job.num_workers} splits batches of an iterable dataset ahead of time, in a process that does not know new shares. "
                "Use num_workers=0, a map-style dataset, or a plan without shares=measured."
            )
        plan.check_batch(job.batch_size)
        self._dataset = dataset if group.rank == 0 else None
        self._job, self._plan, self._shares, self._group = job, plan, shares, group
        self._stop_step = stop_step
        self._seek(start_step)

    @property
    def num_samples(self) -> None:
        return None

    def read(self, step: int) -> list[Chunk]:
        assert step < self._stop_step, f"step {step} of a run that ends before step {self._stop_step}"
        if step != self._next_step:
            self._seek(step)
        self._next_step = step + 1
        if self._group.rank:
            share: list[Chunk] = scatter_objects(self._group, None)
            return share
        chunks = next(self._items)
        self._plan.check_batch(sum(chunk.samples for chunk in chunks))
        m = self._plan.microbatches
        shares = [chunks[replica * m : (replica + 1) * m] for replica in range(self._group.size)]
        if self._group.size > 1:
            scatter_objects(self._group, [None, *shares[1:]])
        return shares[0]

    def close(self) -> None:
        if hasattr(self, "_items"):
            self._items.close()

    def _seek(self, step: int) -> None:
        self.close()
        self._next_step = step
        if self._group.rank == 0:
            source = StepSource(self._dataset, self._job, self._plan, self._shares, step, self._stop_step)
            self._items = read_ahead(source, self._job.num_workers)

"""The shares of the data, one for a push: what a replica of a synchronous plan would read of a batch.

Share n is the share of replica n % dp of batch n // dp, where all batches are full; of a short batch,
replicas without samples are left out. Its samples, its chunks and their draws are those of the synchronous
plan, so with dp=1 a share is a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.data.chunks import Chunk, ChunkRange, share_of, split_batch
from meshloom.data.job_data import build_dataset, is_iterable
from meshloom.data.map_data import Batches, ChunkSource, ReadRequest
from meshloom.data.reading import ReadFailure


@dataclass(frozen=True, kw_only=True)
class PushShare:
    """Chunks `cuts` of global batch `step`, in `epoch`. indices: of its samples in the dataset, in order."""

    epoch: int
    step: int
    cuts: list[ChunkRange]
    indices: list[int]


class PushShares:
    """The shares of a job's data under a plan, read in this process."""

    def __init__(self, job: Job, plan: Plan) -> None:
        dataset = build_dataset(job.data, job.seed)
        if is_iterable(dataset, "Job(data=...)"):
            raise JobError(
                f"exchange=async assigns samples by their number, and Job(data=...) built an iterable {type(dataset).__name__}. "
                "Use a map-style dataset, or another exchange."
            )
        self.num_samples = len(dataset)
        self._plan = plan
        self._batches = Batches(job, self.num_samples)
        self._source: Any = ChunkSource(dataset, job)
        self._epoch = [
            (batch, replica)
            for batch in range(self._batches.per_epoch)
            for replica in range(plan.dp)
            if self._cuts(replica, self._batches.size(batch))
        ]

    @property
    def per_epoch(self) -> int:
        """Shares of an epoch."""
        return len(self._epoch)

    def first_of(self, step: int) -> int:
        """The first share of global batch `step`."""
        epoch, batch = divmod(step, self._batches.per_epoch)
        first = next(number for number, (of, _) in enumerate(self._epoch) if of == batch)
        return epoch * self.per_epoch + first

    def find(self, number: int) -> PushShare:
        """Share `number`, counted from 0 over all epochs."""
        epoch, position = divmod(number, self.per_epoch)
        batch, replica = self._epoch[position]
        step = epoch * self._batches.per_epoch + batch
        _, indices = self._batches.of(step)
        cuts = self._cuts(replica, len(indices))
        return PushShare(epoch=epoch, step=step, cuts=cuts, indices=indices[cuts[0].start : cuts[-1].stop])

    def _cuts(self, replica: int, batch_size: int) -> list[ChunkRange]:
        """A replica's chunks of a batch that have samples."""
        shares = share_of(replica, split_batch(batch_size, self._plan), self._plan)
        return [cut for cut in shares if cut.samples]

    def read(self, number: int) -> list[Chunk]:
        """The chunks of share `number`; their `batch` is its size. Raises `DataError` if the data fails."""
        share = self.find(number)
        first, total = share.cuts[0].start, len(share.indices)
        chunks: list[Chunk] = []
        for cut in share.cuts:
            indices = share.indices[cut.start - first : cut.stop - first]
            with preserved_draws():
                data = self._source[ReadRequest(share.step, cut.index, share.epoch, indices)]
            if isinstance(data, ReadFailure):
                raise data.to_error()
            chunks.append(Chunk(share.step, total, cut.index, cut.samples, data))
        return chunks

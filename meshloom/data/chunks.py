"""Chunks: a chunk is one microbatch of one replica, the input of one forward and backward.

a batch of 10 samples, dp=2, microbatches=2:    replica 0: chunks 0 (3), 1 (3)    replica 1: chunks 2 (2), 3 (2)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from meshloom.core.plan import Plan


class Chunk(NamedTuple):
    """A chunk with its data.

    step: of the run. batch: samples of the step's global batch. index: of the chunk in that batch.
    samples: samples of the chunk. data: what `collate` returned for them; None if there are none.
    """

    step: int
    batch: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    samples: int
    data: Any


class ChunkRange(NamedTuple):
    """A chunk without its data: samples `start` to `stop` of its batch are chunk `index`."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


def split_batch(num_samples: int, plan: Plan, shares: Sequence[int] = ()) -> list[ChunkRange]:
    """All chunks of a batch of `num_samples`, in order: contiguous, larger ones first within a share.

    shares: as of `Plan.sizes`.

    >>> split_batch(3, Plan(dp=2))
    [ChunkRange(index=0, start=0, stop=2), ChunkRange(index=1, start=2, stop=3)]
    >>> split_batch(5, Plan(dp=2), (1, 4))
    [ChunkRange(index=0, start=0, stop=1), ChunkRange(index=1, start=1, stop=5)]
    """
    sizes = plan.sizes(num_samples, shares)
    return [
        ChunkRange(index, stop - size, stop)
        for index, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True))
    ]


def share_of(replica: int, ranges: list[ChunkRange], plan: Plan) -> list[ChunkRange]:
    """The chunks of `replica`, empty ones included."""
    return ranges[replica * plan.microbatches : (replica + 1) * plan.microbatches]


class Reader(ABC):
    """The contract of a reader: the chunks of one replica, step after step."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Samples of an epoch; None for a stream, whose length is unknown."""

    @abstractmethod
    def read(self, step: int) -> list[Chunk]:
        """This replica's chunks of `step`, in order, empty ones included; all replicas call it together.

        The step after the last one is read ahead; any other restarts the reader there. Raises `DataError`
        with the sample and the user's source line if the job's dataset or `collate` fails.
        """

    @abstractmethod
    def close(self) -> None:
        """End the worker processes."""

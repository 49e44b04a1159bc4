"""The samples that a data loader's sampler draws, as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshloom.core.errors import JobError


class DrawnSamples(IterableDataset[Any]):
    """The samples of the loader's batches, batch after batch and epoch after epoch. Batches of another number than `batch_size`
    are left out, so that those of a job are the loader's.

    >>> from torch.utils.data import BatchSampler
    >>> loader = DataLoader([10, 11, 12, 13, 14], batch_sampler=BatchSampler([4, 0, 3, 1, 2], 2, drop_last=False))
    >>> stream = iter(DrawnSamples(loader, 2))
    >>> [next(stream) for _ in range(6)]
    [14, 10, 13, 11, 14, 10]
    """

    def __init__(self, loader: DataLoader[Any], batch_size: int) -> None:
        self._loader, self._batch_size = loader, batch_size

    def __iter__(self) -> Iterator[Any]:
        """Raises `JobError` for a sampler that draws no such batch in an epoch."""
        dataset: Any = self._loader.dataset
        while True:
            sizes = set[int]()
            for indices in self._loader.batch_sampler or ():
                sizes.add(len(indices))
                if len(indices) == self._batch_size:
                    yield from (dataset[index] for index in indices)
            if self._batch_size not in sizes:
                raise JobError(
                    f"The sampler draws batches of {sorted(sizes)} samples, and none of {self._batch_size}, the job's batch_size. Give a number that it draws."
                )

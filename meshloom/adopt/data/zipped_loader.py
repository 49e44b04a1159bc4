"""Several data loaders whose batches come together, as `zip` gives them, as one loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Together(tuple[list[Any], ...]):
    """A sample of a zipped loader: of each loader, a list of its samples."""


class ZippedSamples(Dataset[Together]):
    """Of each dataset `counts` samples at a time, each in an order of its own in every epoch. drawn: whether that is random; else it
    is that of the dataset. cycled: whether a dataset begins anew behind its end; the shortest of the others ends the epoch."""

    def __init__(
        self, datasets: Sequence[Any], counts: Sequence[int], drawn: Sequence[bool], cycled: Sequence[bool]
    ) -> None:
        self.datasets, self._counts, self._drawn = datasets, counts, drawn
        lengths = [len(each) // count for each, count in zip(datasets, counts, strict=True)]
        self._length = min(length for length, again in zip(lengths, cycled, strict=True) if not again)
        self._epoch = 0
        self._orders: dict[tuple[int, int], Tensor] = {}

    def set_epoch(self, epoch: int) -> None:
        """Draw the orders of an epoch."""
        self._epoch, self._orders = epoch, {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Together:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return Together(
            [self._sample(place, index * count + number) for number in range(count)]
            for place, count in enumerate(self._counts)
        )

    def _sample(self, place: int, number: int) -> Any:
        dataset = self.datasets[place]
        turn, within = divmod(number, len(dataset))
        if not self._drawn[place]:
            return dataset[within]
        if (place, turn) not in self._orders:
            seed = (self._epoch * 1009 + place) * 100_003 + turn
            generator = torch.Generator().manual_seed(seed)
            self._orders[place, turn] = torch.randperm(len(dataset), generator=generator)
        return dataset[int(self._orders[place, turn][within])]


class ZippedCollate:
    """A batch of each loader, by its own function; of other samples, as those of an evaluation, by that of the first."""

    def __init__(self, functions: Sequence[Callable[[list[Any]], Any]]) -> None:
        self.functions = functions

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], Together):
            return self.functions[0](samples)
        lists = ([each for one in samples for each in one[place]] for place in range(len(self.functions)))
        return tuple(collate(own) for collate, own in zip(self.functions, lists, strict=True))


class ZippedLoader(DataLoader[Together]):
    """The loaders' full batches together. Batches are of so many samples of each that one can be divided as evenly as the greatest common divisor
    of their sizes allows. cycled: places of loaders that begin anew behind their end.

    >>> few, many = DataLoader([1, 2, 3, 4], batch_size=2), DataLoader(range(10, 18), batch_size=4)
    >>> zipped = ZippedLoader(few, many)
    >>> zipped.batch_size, len(zipped), [(a.tolist(), b.tolist()) for a, b in zipped]
    (2, 2, [([1, 2], [10, 11, 12, 13]), ([3, 4], [14, 15, 16, 17])])
    """

    def __init__(self, *loaders: DataLoader[Any], cycled: Sequence[int] = ()) -> None:
        sizes = [each.batch_size or 1 for each in loaders]
        together = math.gcd(*sizes)
        samples = ZippedSamples(
            [each.dataset for each in loaders], [size // together for size in sizes],
            [isinstance(each.sampler, RandomSampler) for each in loaders], [place in cycled for place in range(len(loaders))],
        )  # fmt: skip
        collate = ZippedCollate([each.collate_fn for each in loaders])
        super().__init__(
            samples, batch_size=together, drop_last=True, collate_fn=collate, num_workers=max(each.num_workers for each in loaders)
        )  # fmt: skip

    @staticmethod
    def together(batches: Sequence[list[Any]]) -> list[Any]:
        """The samples of one batch of each loader, as this loader's dataset has them."""
        count = math.gcd(*map(len, batches))
        return [
            Together(each[len(each) // count * place :][: len(each) // count] for each in batches)
            for place in range(count)
        ]

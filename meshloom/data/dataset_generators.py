"""Generators that a dataset holds are seeded anew for every sample, as the global ones are, so that what a sample is does not depend on which
rank reads it, and after which others."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from meshloom.core.modules.held_generators import Generator, held_generators
from meshloom.core.random import derive


class DatasetGenerators:
    """Those of `dataset`, and of what it holds. names: where."""

    def __init__(self, dataset: Any) -> None:
        self._found = held_generators(dataset)
        self.names = list(self._found)

    def seed(self, value: int) -> None:
        """Each by its name."""
        for name, generator in self._found.items():
            _seed(generator, derive(value, name))


def _seed(generator: Generator, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(value).state
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed(value % 2**32)
    else:
        generator.seed(value)

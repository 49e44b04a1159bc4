"""Generators that datasets hold and draw with themselves, as in `self.rng.normal()`.

Each is seeded anew for every sample, as the global ones are, so that what a sample is does not depend on which rank reads it, and after which
others.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any, cast

import numpy
import torch
from torch import nn

from meshloom.core.random import derive

_DEEPEST = 4  # datasets around datasets, transforms within them
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_NO_PARTS = (
    str,
    bytes,
    int,
    float,
    torch.Tensor,
    numpy.ndarray,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
)


class DatasetGenerators:
    """Those in attributes of `dataset`, of datasets and other objects that it holds, such as transforms, and in lists of such. names: where."""

    def __init__(self, dataset: Any) -> None:
        self._found = dict(_held(dataset, "", _DEEPEST, set()))

    @property
    def names(self) -> list[str]:
        return list(self._found)

    def seed(self, value: int) -> None:
        """Each by its name."""
        for name, generator in self._found.items():
            _seed(generator, derive(value, name))


def _held(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _GENERATORS):
        yield name, value
        return
    if not depth or isinstance(value, _NO_PARTS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        parts = {str(number): each for number, each in enumerate(cast(list[Any], value)[:64])}
    else:
        parts = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for key, each in parts.items():
        yield from _held(each, f"{name}.{key}" if name else key, depth - 1, seen)


def _seed(generator: Any, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(value).state
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed(value % 2**32)
    else:
        generator.seed(value)

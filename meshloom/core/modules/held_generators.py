"""Generators that datasets hold and draw with themselves, as in `self.rng.normal()`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy
import torch
from torch import nn

Generator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random
_DEEPEST = 4  # datasets around datasets, transforms within them
_MOST_PARTS = 64  # of a list
_NO_PARTS = (str, bytes, int, float, torch.Tensor, numpy.ndarray, nn.Module, type, ModuleType, FunctionType)


def held_generators(value: Any) -> dict[str, Generator]:
    """Those in attributes of `value`, of other objects that it holds, such as datasets and transforms, and in lists of such; each once, by its
    first path."""
    return dict(_held(value, "", _DEEPEST, set()))


def _held(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Generator]]:
    if isinstance(value, _NO_PARTS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Generator):
        yield path, value
    elif depth:
        parts: dict[Any, Any] = dict(getattr(value, "__dict__", {}))
        if isinstance(value, list | tuple):
            parts = dict(enumerate(cast(list[Any], value)[:_MOST_PARTS]))
        for name, each in parts.items():
            yield from _held(each, f"{path}.{name}" if path else str(name), depth - 1, seen)

"""States of random generators, and tensors within nested values."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor

Draws = tuple[Tensor, Any, Any]  # states of torch, random and numpy


def draws_now() -> Draws:
    """States of the CPU generators."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_draws(draws: Draws) -> None:
    """Go on from states of the CPU generators."""
    torch.set_rng_state(draws[0])
    random.setstate(draws[1])
    numpy.random.set_state(draws[2])


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for each in value for one in tensors_of(each)] if isinstance(value, list | tuple) else []


def is_batch(value: Any) -> bool:
    """Whether it is tensors without gradients, of as many rows each."""
    found = tensors_of(value) if isinstance(value, Tensor | list | tuple | dict) else []
    return (
        bool(found)
        and all(each.dim() and not each.requires_grad for each in found)
        and len({len(each) for each in found}) == 1
    )

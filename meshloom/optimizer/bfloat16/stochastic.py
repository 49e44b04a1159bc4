"""Stochastic rounding of float32 to bfloat16: up or down with the probability of the distance, so that the mean is the value.

A float32 has 16 binary digits more than a bfloat16. A draw of 16 digits is added to them, and they are cut off:

    value    0 01111111 0000000 0100000000000000      a quarter of the way from one bfloat16 to the next
    + draw                      0..1111111111111111   carries in a quarter of the cases

Draws depend on a key and on the number of the element in the full parameter, so a slice or shard rounds as the whole does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshloom.core.random import derive
from meshloom.exchange.exchange import Slice
from meshloom.parameters.shards import Shards

_MANTISSA = 0xFFFF
# of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), as signed numbers
_GAMMA, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


class StochasticRounding:
    """Of a job's parameters. seed: the job's. step: the current one."""

    def __init__(self, seed: int, step: Callable[[], int]) -> None:
        self._seed, self._step = seed, step
        self._newest, self._updates = -1, 0

    def begin(self) -> None:
        """An update begins, one of the step's."""
        step = self._step()
        self._updates = self._updates + 1 if step == self._newest else 0
        self._newest = step

    def rounded(self, value: Tensor, slice_: Slice, shards: Shards) -> Tensor:
        """`value` [n], float32, of the elements of `slice_`, as bfloat16."""
        key = derive(self._seed, "rounding", self._newest, self._updates, slice_.name)
        index = torch.arange(slice_.start, slice_.stop, device=value.device)
        if slice_.name in shards.pieces:
            shape = shards.pieces[slice_.name].shape
            every = torch.arange(math.prod(shape)).view(shape)
            mine = shards.take(slice_.name, every).reshape(-1)
            index = mine[slice_.start : slice_.stop].to(value.device)
        return rounded(value, key, index)


def rounded(value: Tensor, key: int, index: Tensor) -> Tensor:
    """`value` [n], float32, as bfloat16. key: of the draws. index: int64 [n], numbers of the elements.

    >>> values = torch.full((4096,), 1 + 2**-9)  # a quarter of the way from 1 to 1 + 2**-7
    >>> found = rounded(values, 7, torch.arange(4096))
    >>> found.unique().tolist(), round((found == 1).double().mean().item(), 2)
    ([1.0, 1.0078125], 0.75)
    """
    bits = value.view(torch.int32)
    moved = (bits + draws(key, index)) & ~_MANTISSA
    kept = torch.where(value.isfinite(), moved, bits)
    return kept.view(torch.float32).to(torch.bfloat16)


def draws(key: int, index: Tensor) -> Tensor:
    """16 random binary digits of each element, int32 [n]."""
    mixed = _mixed(index * _GAMMA + key)
    return (mixed & _MANTISSA).to(torch.int32)


def _mixed(number: Tensor) -> Tensor:
    number = (number ^ _shifted(number, 30)) * _FIRST
    number = (number ^ _shifted(number, 27)) * _SECOND
    return number ^ _shifted(number, 31)


def _shifted(number: Tensor, by: int) -> Tensor:
    """To the right, with zeros."""
    return (number >> by) & ((1 << (64 - by)) - 1)

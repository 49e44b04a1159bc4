"""Rounding of float32 to bfloat16 by chance, a second implementation: with unsigned numbers, in numpy.

The upper 16 bits of a float32 are a bfloat16, the next one towards zero; the lower 16 say how far the value is from it. It
becomes the one after that where these and the element's draw add up to 2**16 or more.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from meshloom.core.random import derive


def rounded_by_chance(values: Tensor, seed: int, step: int, update: int, name: str) -> Tensor:
    """A parameter's values, float32, as bfloat16 on their device. update: number of the update in the step."""
    flat = values.detach().cpu().contiguous().numpy().reshape(-1)
    bits = flat.view(numpy.uint32)
    key = numpy.uint64(derive(seed, "rounding", step, update, name))
    with numpy.errstate(over="ignore"):
        state = numpy.arange(flat.size, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> numpy.uint64(shift))) * numpy.uint64(factor)
    state ^= state >> numpy.uint64(31)
    draws = (state % numpy.uint64(2**16)).astype(numpy.uint32)
    upper, lower = bits >> 16, bits % 2**16
    up = (lower + draws >= 2**16) & numpy.isfinite(flat)
    found = ((upper + up) << 16).astype(numpy.uint32).view(numpy.float32)
    nearest = torch.from_numpy(numpy.where(numpy.isfinite(flat), found, flat))
    return nearest.to(torch.bfloat16).view(values.shape).to(values.device)

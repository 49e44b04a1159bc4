"""A hash of the bits of a tensor, computed where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of a tensor, as an int64 scalar on its device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:  # a parameter may start anywhere in a bucket
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    words = flat.view(torch.int64)
    # An odd multiplier per position (wrapping), so that permuted and shifted contents differ.
    position = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
    return ((words ^ (words >> 29)) * (position * -7046029254386353131 | 1)).sum()

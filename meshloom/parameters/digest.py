"""A hash of a tensor's bits, computed on the tensor's device."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.core.device.flat_bytes import flat_bytes

BLOCK_WORDS = 1 << 18  # of 8 bytes: temporaries have the size of a block, not of the tensor


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of a tensor, as an int64 scalar on its device.

    It needs a few times `BLOCK_WORDS` of memory besides the tensor; a tensor that is not contiguous is
    copied.
    """
    flat = flat_bytes(tensor)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first_word in range(0, -(-flat.numel() // 8), BLOCK_WORDS):
        total += _of_block(flat[8 * first_word : 8 * (first_word + BLOCK_WORDS)], first_word)
    return total


def _of_block(block: Tensor, first_word: int) -> Tensor:
    """The contribution of some bytes to the sum; the first of them begin word `first_word`."""
    if block.numel() % 8 or block.storage_offset() % 8:  # a parameter may start anywhere in a bucket
        block = torch.cat([block, block.new_zeros(-block.numel() % 8)])
    words = block.view(torch.int64)
    # An odd multiplier per position (wrapping), so that permuted and shifted contents differ.
    position = torch.arange(first_word, first_word + words.numel(), device=words.device, dtype=torch.int64)
    return ((words ^ (words >> 29)) * (position * -7046029254386353131 | 1)).sum()

"""Hashes of tensors: the same for the same bits wherever they lie, and computed block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.parameters.digest import BLOCK_WORDS, digest


def naive(tensor: Tensor) -> int:
    """The sum over all words, in Python's whole numbers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    words = (int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8))
    total = sum(
        (word ^ (word >> 29)) * ((number * -7046029254386353131) | 1) for number, word in enumerate(words)
    )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.every
def test_a_digest_is_the_sum_over_words_wherever_the_tensor_starts(size: int, dtype: torch.dtype):
    bucket = (torch.randn(size + 3) * 100).to(dtype)
    for start in (0, 3):
        tensor = bucket[start : start + size]
        assert int(digest(tensor)) == naive(tensor)


@pytest.mark.long
def test_blocks_make_no_difference():
    """One word more than a block, and one element more than that."""
    tensor = torch.arange(2 * BLOCK_WORDS + 3, dtype=torch.int32)
    assert int(digest(tensor)) == naive(tensor)
    moved = tensor.clone()
    moved[[0, 2 * BLOCK_WORDS]] = moved[[2 * BLOCK_WORDS, 0]]
    assert int(digest(moved)) != int(digest(tensor))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest memory that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
            self.num_bytes = max(self.num_bytes, made.untyped_storage().nbytes())
        return made


def test_nothing_of_the_tensors_size_is_made_on_the_way():
    """Comparing replicas took three times the largest parameter, in the middle of a run that fitted just
    so."""
    tensor = torch.randn(4 * BLOCK_WORDS + 1)
    with Largest() as largest:
        digest(tensor[1:])  # starts in the middle of a word
    assert largest.num_bytes <= 8 * BLOCK_WORDS < tensor.nbytes / 1.9

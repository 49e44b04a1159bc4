"""The bytes of a dense tensor, in the order of its elements."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_bytes(tensor: Tensor) -> Tensor:
    """uint8 [tensor.nbytes], on its device; a copy of a tensor that is not contiguous, or is a conjugated or negative view. A single
    element may have any stride (`expand(1)`), with which torch counts it as contiguous and views it as no other dtype.

    >>> flat_bytes(torch.ones((), dtype=torch.int16).expand(1)).tolist()
    [1, 0]
    >>> flat_bytes(torch.tensor([1 + 1j]).conj()).equal(flat_bytes(torch.tensor([1 - 1j])))
    True
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat
    return flat.view(torch.uint8)

"""How much of each column a tensor is made of."""

from __future__ import annotations

import torch
from torch import Tensor


def fitted(columns: list[Tensor], target: Tensor) -> tuple[list[float], float]:
    """Factors of `columns` whose sum comes closest to `target`, all [n], and the norm of what is left.

    By singular values, for columns that depend on each other; GPUs have no such driver, so it is solved on the CPU.
    """
    matrix, right = torch.stack(columns, 1).cpu(), target.cpu()
    factors = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    return factors.tolist(), float((matrix @ factors - right).norm())

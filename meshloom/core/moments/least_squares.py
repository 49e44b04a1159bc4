"""Least squares with the same bits on every rank of a replica.

LAPACK's `gelsy`, which `torch.linalg.lstsq` takes by default on CPUs, reads an array of pivots that torch does not fill, so it returns other last
bits from call to call. Ranks that compute the same parts of a model would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshloom.core.moments.once import once_in_process

_linalg: Any = torch.linalg


@once_in_process
@contextmanager
def least_squares_alike() -> Iterator[None]:
    """A context in which `torch.linalg.lstsq` takes `gelsd` on CPUs, where no driver is named: by singular values, for every rank of a matrix
    as `gelsy` is."""
    of_torch = _linalg.lstsq
    _linalg.lstsq = _by_singular_values(of_torch)
    try:
        yield
    finally:
        _linalg.lstsq = of_torch


def _by_singular_values(lstsq: Any) -> Any:
    def solve(a: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None, **kwargs: Any) -> Any:
        """a [..., m, n], b [..., m, k] -> as torch returns it."""
        chosen = "gelsd" if driver is None and a.device.type == "cpu" else driver
        return lstsq(a, b, rcond, driver=chosen, **kwargs)

    return solve

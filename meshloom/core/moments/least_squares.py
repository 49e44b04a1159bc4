"""Least squares with the same bits on every rank of a replica.

LAPACK's `gelsy`, which `torch.linalg.lstsq` takes by default on CPUs, reads an array of pivots that torch does not fill, so it returns other last
bits from call to call. Ranks that compute the same parts of a model would drift apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_linalg: Any = torch.linalg


@contextmanager
def least_squares_alike() -> Iterator[None]:
    """A context in which `torch.linalg.lstsq` takes `gelsd` on CPUs, where no driver is named: by singular values, for every rank of a matrix
    as `gelsy` is."""
    _Replaced.enter()
    try:
        yield
    finally:
        _Replaced.leave()


class _Replaced:
    """Torch's function, of which a process has one: ranks of one process may enter and leave in any order."""

    _lock = threading.Lock()
    _inside = 0
    _as_it_was: Any = None

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            if not cls._inside:
                cls._as_it_was = _linalg.lstsq
                _linalg.lstsq = _by_singular_values(_linalg.lstsq)
            cls._inside += 1

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._inside -= 1
            if not cls._inside:
                _linalg.lstsq = cls._as_it_was


def _by_singular_values(lstsq: Any) -> Any:
    def solve(a: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None, **kwargs: Any) -> Any:
        """a [..., m, n], b [..., m, k] -> as torch returns it."""
        chosen = "gelsd" if driver is None and a.device.type == "cpu" else driver
        return lstsq(a, b, rcond, driver=chosen, **kwargs)

    return solve

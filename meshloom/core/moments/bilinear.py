"""`F.bilinear` under autocast, where modes see operators: the values that it has under none.

Below such a mode torch leaves autocast out of the products within this operator, which are in bfloat16 or float16 else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from meshloom.core.moments.once import once_in_process


@once_in_process
@contextmanager
def bilinear_unwatched() -> Iterator[None]:
    """A context in which modes do not see what `F.bilinear` does, and do not change it. That it casts, they see."""
    of_torch: Any = F.bilinear

    @wraps(of_torch)
    def bilinear(input1: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = input1.device.type
        if torch.is_autocast_enabled(kind):
            input1.new_empty(0).to(torch.get_autocast_dtype(kind))
        with _disable_current_modes():
            return of_torch(input1, *args, **kwargs)

    F.bilinear = bilinear
    try:
        yield
    finally:
        F.bilinear = of_torch

"""`torch.cond` in code that runs as written: the branch that its condition chooses, as a call like any other.

Torch compiles each call of `torch.cond`, in eager too. Compiled under one mode that watches operators, it fails in all later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from meshloom.core.moments.once import once_in_process


@once_in_process
@contextmanager
def branches_as_written() -> Iterator[None]:
    """A context in which `torch.cond` of a condition with a value calls the branch; where code is read or compiled it is torch's.

    >>> with branches_as_written():
    ...     torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.tensor(1.0),))
    tensor(2.)
    """
    of_torch: Any = torch.cond

    @wraps(of_torch)
    def cond(
        pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()
    ) -> Any:
        if torch.compiler.is_compiling() or (isinstance(pred, Tensor) and type(pred) is not Tensor):
            return of_torch(pred, true_fn, false_fn, operands)
        return (true_fn if pred else false_fn)(*operands)

    torch.cond = cond
    try:
        yield
    finally:
        torch.cond = of_torch

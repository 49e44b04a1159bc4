"""Code that the user has compiled, run as it is written, and ours, which is not compiled with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshloom.core.moments.once import once_in_process


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs as it is written what the user has compiled, functions too: compiled code takes no tensors without values, and
    shows no operators to who reads it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _eager():
        yield


def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch's compiler leaves as it is also where it is called while compiled code runs, as hooks are by an
    operator that cannot be compiled. Such calls are compiled otherwise, and count as graph breaks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return function
    disabled: Any = torch.compiler.disable
    return disabled(function)


@once_in_process
@contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield

"""Code that the user has compiled, run as it is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@once_in_process
@contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield

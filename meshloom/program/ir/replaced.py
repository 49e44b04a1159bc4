"""Attributes of torch's classes and modules that are others for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a class or module, and restores it on exit."""
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def seen_as_exported(exported: bool = True) -> Iterator[None]:
    """What `torch.compiler.is_compiling` and `is_exporting` say: code takes other branches when they say so."""
    with (
        replaced(torch.compiler, "_is_compiling_flag", exported),
        replaced(torch.compiler, "_is_exporting_flag", exported),
    ):
        yield

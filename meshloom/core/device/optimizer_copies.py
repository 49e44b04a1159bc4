"""Copies of optimizers that take steps where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer


def make_copies_step(copies: Iterable[Any]) -> None:
    """Let those of `copies` that are optimizers take steps: where there is a GPU, torch asks them for a setting `capturable`, which
    not all have, unless an attribute is set that its copies lose."""
    for each in copies:
        if isinstance(each, Optimizer):
            vars(each).setdefault("_warned_capturable_if_run_uncaptured", True)

"""Refuses draws of Python and NumPy, which a program would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy
import torch

from meshloom.core.errors import CaptureError
from meshloom.core.modules.packages import is_users
from meshloom.program.ir.lines import WAY_OUT, SourceLine, describe_line, line_of_frame
from meshloom.program.ir.sparse_constants import bits_of, dense_parts


class FrozenDrawError(CaptureError):
    """A forward draws with `random` or numpy."""


def check_draws() -> Callable[[Callable[[], Any]], None]:
    """Record the states of Python's and NumPy's generators. The returned function raises `CaptureError` if
    they changed, after repeating the run to find the line."""
    before = python_states()

    def check(rerun: Callable[[], Any]) -> None:
        for kind, state in python_states().items():
            if state != before[kind]:
                line = line_that_changes(rerun, _GENERATORS[kind])
                raise FrozenDrawError(
                    f"The forward draws from {kind} at {describe_line(line)}, and draws of programs are torch's. Write torch.rand(()), .uniform_ or torch.randint, or "
                    f"mark the function that draws with @ml.leaf, or name its module in Job(leaves=[...]), where random and numpy are seeded for each call. {WAY_OUT}"
                ).at(None, line)

    return check


def python_states() -> dict[str, Any]:
    """The states of Python's and NumPy's generators."""
    return {kind: state() for kind, state in _GENERATORS.items()}


_GENERATORS: dict[str, Callable[[], Any]] = {
    "random": random.getstate,
    "numpy.random": lambda: repr(numpy.random.get_state(legacy=False)),
}


def line_that_changes(run: Callable[[], Any], observe: Callable[[], Any]) -> SourceLine | None:
    """The user's line in `run` during which the value of `observe` first changed; None: it was not found.

    >>> counts = [0]
    >>> def count():
    ...     counts[0] += 1
    >>> line_that_changes(count, lambda: counts[0]) is None
    True
    """
    found: list[SourceLine | None] = []
    seen = observe()
    before: dict[FrameType, SourceLine | None] = {}

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if found:
            return None
        if not is_users(frame.f_code.co_filename):
            return None if event == "call" else look
        if observe() != seen:
            found.append(before.get(frame) or line_of_frame(frame))
            return None
        before[frame] = line_of_frame(frame)
        return look

    previous = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    finally:
        sys.settrace(previous)
    return found[0] if found else None


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are equal, NaNs included."""
    ours, theirs = dense_parts(one), dense_parts(other)
    return len(ours) == len(theirs) and all(
        torch.equal(bits_of(mine), bits_of(other)) for mine, other in zip(ours, theirs, strict=True)
    )

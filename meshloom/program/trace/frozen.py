"""Refuses what a program would freeze: draws of Python and NumPy, and differences between two exports."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy
import torch

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAY_OUT, WAYS_OUT, SourceLine, describe_line, is_users, line_of_frame
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
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


def check_equal(first: Program, second: Program) -> None:
    """Raise `CaptureError` at the first difference of two exports."""
    for one, other in zip(first.nodes, second.nodes, strict=False):
        if _fact(one) != _fact(other):
            raise CaptureError(
                f"What runs at {describe_line(one.line or other.line)} depends on more than the batch's tensors and torch's draws: "
                f"read twice it was {_shown(one, other)} and {_shown(other, one)}. Compute it from tensors. {WAYS_OUT}"
            ).at(one.path)
    for name, constant in first.constants.items():
        other = second.constants.get(name)
        if other is None or not equal_bits(constant, other):
            user = next(
                (node for node in first.nodes if any(ref.name == name for ref in node.operands())), None
            )
            line = user.line if user else None
            raise CaptureError(
                f"A tensor made outside of torch's operators is used at {describe_line(line)}, and was another one when the loss was captured again. "
                f"Make it with torch from the batch, or make it a buffer. {WAYS_OUT}"
            ).at(user.path if user else None)
    if first.describe() != second.describe():
        raise CaptureError(
            f"Reading the loss twice gave two programs, of {len(first.nodes)} and {len(second.nodes)} operators. {WAY_OUT}"
        )


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


def _fact(node: Node) -> str:
    return f"{node.name} {node.operator} {node.args} {dict(node.kwargs)} {node.context} {node.outputs}"


def _shown(node: Node, other: Node) -> str:
    if node.operator != other.operator:
        return node.operator
    arguments = ((*each.args, *each.kwargs.values()) for each in (node, other))
    for mine, theirs in zip(*arguments, strict=False):
        if mine != theirs:
            return f"{node.operator} of {mine}"
    return f"{node.operator} in {node.context}"


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are equal, NaNs included."""
    ours, theirs = dense_parts(one), dense_parts(other)
    return len(ours) == len(theirs) and all(
        torch.equal(bits_of(mine), bits_of(other)) for mine, other in zip(ours, theirs, strict=True)
    )

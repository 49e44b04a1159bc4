"""Iterations of loops in a program: stretches of operators that follow each other several times.

    for t in range(4):                    select  mul  add   select  mul  add   select  mul  add   select  mul  add
        state = state * decay + x[:, t]      iteration 0        iteration 1        iteration 2        iteration 3

Nothing in a program says that there was a loop. What repeats is found by its operators, their shapes and
modules; indices may differ.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.program.ir.nodes import Node, Ref

LEAST = 4  # iterations: what happens to be there twice or three times is no loop
PERIODS = 16  # that are tried where a stretch may begin: how often its first operator may be in it


def iterations_of(nodes: Sequence[Node]) -> list[list[Sequence[Node]]]:
    """Loops in program order, as their iterations."""
    kinds: dict[Any, int] = {}
    row = [kinds.setdefault(_kind(node), len(kinds)) for node in nodes]
    again = _again(row)
    loops: list[list[Sequence[Node]]] = []
    start = 0
    while start < len(row):
        period, count = _longest(row, again, start)
        if count >= LEAST:
            loops.append(
                [nodes[start + turn * period : start + (turn + 1) * period] for turn in range(count)]
            )
        start += period * count if count >= LEAST else 1
    return loops


def constants_of(node: Node) -> object:
    """Arguments of a node without references, and without an index that says which of several alike it
    takes."""
    args: tuple[Any, ...] = node.args
    if node.target is torch.ops.aten.select.int:
        args = args[:2]
    elif node.target is operator.getitem:
        args = args[:1]
    return _constants((args, tuple(node.kwargs.items())))


def _constants(value: object) -> object:
    if isinstance(value, Ref):
        return Ref
    if isinstance(value, tuple | list):
        return tuple(map(_constants, value))
    return value


def _kind(node: Node) -> object:
    """What is equal in all iterations."""
    made = tuple((each.shape, each.dtype, each.requires_grad) for each in node.outputs)
    return node.target, node.path, node.context.grad, made, repr(constants_of(node))


def _again(row: Sequence[int]) -> list[int]:
    """For each place, the next one that has the same; one behind the end if there is none."""
    last: dict[int, int] = {}
    found = [len(row)] * len(row)
    for place in range(len(row) - 1, -1, -1):
        found[place] = last.get(row[place], len(row))
        last[row[place]] = place
    return found


def _longest(row: Sequence[int], again: Sequence[int], start: int) -> tuple[int, int]:
    """Period, and how often, of what repeats from `start` on and covers most; (1, 1): nothing does."""
    best, place = (1, 1), start
    for _ in range(PERIODS):
        place = again[place]
        period = place - start
        if place + period > len(row):
            break
        count = 1
        while row[start : start + period] == row[start + count * period : start + (count + 1) * period]:
            count += 1
        if count >= LEAST and count * period > best[0] * best[1]:
            best = period, count
    return best

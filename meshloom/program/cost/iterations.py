"""Finds iterations of loops in a program: sequences of operators that repeat.

    for t in range(4):                    select  mul  add   select  mul  add   select  mul  add   select  mul  add
        state = state * decay + x[:, t]      iteration 0        iteration 1        iteration 2        iteration 3

A program does not record its loops. They are found by operators, shapes and modules; indices may differ.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.program.ir.nodes import Node, Ref

MIN_ITERATIONS = 4  # fewer repetitions may be there by chance
MAX_PERIODS = 16  # tried at a start: occurrences of its first operator within an iteration


def iterations_of(nodes: Sequence[Node]) -> list[list[Sequence[Node]]]:
    """Loops in program order, as lists of iterations."""
    kinds: dict[Any, int] = {}
    row = [kinds.setdefault(_kind(node), len(kinds)) for node in nodes]
    next_places = _next_places(row)
    loops: list[list[Sequence[Node]]] = []
    start = 0
    while start < len(row):
        period, count = _longest(row, next_places, start)
        if count < MIN_ITERATIONS:
            start += 1
            continue
        end = start + period * count
        loops.append([nodes[place : place + period] for place in range(start, end, period)])
        start = end
    return loops


def constants_of(node: Node) -> object:
    """Arguments of a node without references, and without the index of a select or getitem."""
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
    """Equal for the same operator in all iterations."""
    outputs = tuple((each.shape, each.dtype, each.requires_grad) for each in node.outputs)
    return node.target, node.path, node.context.grad, outputs, repr(constants_of(node))


def _next_places(row: Sequence[int]) -> list[int]:
    """For each place, the next one with the same entry; the end if there is none."""
    last: dict[int, int] = {}
    found = [len(row)] * len(row)
    for place in range(len(row) - 1, -1, -1):
        found[place] = last.get(row[place], len(row))
        last[row[place]] = place
    return found


def _longest(row: Sequence[int], next_places: Sequence[int], start: int) -> tuple[int, int]:
    """Period and number of the repetitions from `start` on that cover most; (1, 1): none."""
    best, place = (1, 1), start
    for _ in range(MAX_PERIODS):
        place = next_places[place]
        period = place - start
        if place + period > len(row):
            break
        count = 1
        while row[start : start + period] == row[start + count * period : start + (count + 1) * period]:
            count += 1
        if count >= MIN_ITERATIONS and count * period > best[0] * best[1]:
            best = period, count
    return best

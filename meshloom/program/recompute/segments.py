"""Splits a program so that values kept at segments' borders and one recomputed segment take the least memory.

    borders  B        bytes of the values that a later segment reads, each counted once
    inside   I_k      bytes that the operators of segment k create
    least    2 B + max I_k      as borders of every microbatch in flight are kept, and one segment at a time is recomputed

A chain of n equal values is split into about sqrt(n) segments (Chen et al., 2016, "Training deep nets with
sublinear memory cost"); blocks of a transformer where only the residual stream crosses. For a limit on I the
least B is exact, by dynamic programming over the places where little crosses; several limits are tried.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

from meshloom.program.ir.nodes import Node, refs_in
from meshloom.program.ir.program import Program

IN_FLIGHT = 2.0
NUM_LIMITS = 16
MOST_PLACES = 400


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive nodes. given: values of others that they read. results: their values that are read later.
    dying: values that are not read later.
    """

    nodes: tuple[Node, ...]
    given: tuple[str, ...]
    results: tuple[str, ...]
    dying: tuple[str, ...]


def segments_of(program: Program) -> tuple[Segment, ...]:
    """All nodes of `program`, in order, in segments."""
    returned = {ref.name for ref in refs_in((program.outputs, tuple(program.updates.values())))}
    later = set(returned)
    found: list[Segment] = []
    for nodes in reversed(_cut(program.nodes, returned)):
        own = {node.name for node in nodes}
        read = dict.fromkeys(ref.name for node in nodes for ref in node.operands())
        given = tuple(name for name in read if name not in own)
        results = tuple(node.name for node in nodes if node.name in later)
        dying = tuple(name for name in given if name not in later)
        found.append(Segment(nodes=nodes, given=given, results=results, dying=dying))
        later.update(given)
    return tuple(reversed(found))


def _cut(nodes: Sequence[Node], returned: set[str]) -> list[tuple[Node, ...]]:
    line = _Line(nodes, returned)
    total = float(line.inside[-1])
    if not total:
        return [tuple(nodes)] if nodes else []
    limits = numpy.geomspace(max(line.largest, total / len(nodes)), total, NUM_LIMITS)
    _, places = min((line.cut(float(limit)) for limit in limits), key=lambda found: (found[0], len(found[1])))
    return [tuple(nodes[start:stop]) for start, stop in pairwise(places)]


def is_view(target: Any) -> bool:
    """Whether an operator returns a view of its first operand, or may."""
    if target is operator.getitem:
        return True
    returns = getattr(getattr(target, "_schema", None), "returns", ())
    return any(each.alias_info is not None for each in returns)


class _Line:
    """The nodes in order. A place is a number of nodes: those before it. inside: bytes created up to every
    place, of values that require grad."""

    def __init__(self, nodes: Sequence[Node], returned: set[str]) -> None:
        count = len(nodes)
        at: dict[str, int] = {}  # value -> the node that made its memory
        made = numpy.zeros(count)
        self._bytes = numpy.zeros(count)
        self._last = numpy.zeros(count, dtype=int)
        for number, node in enumerate(nodes):
            operands = [at[ref.name] for ref in node.operands() if ref.name in at]
            self._last[operands] = number
            if is_view(node.target) and operands:
                at[node.name] = operands[0]
                continue
            at[node.name] = number
            self._bytes[number] = sum(each.num_bytes for each in node.outputs)
            made[number] = self._bytes[number] if any(each.requires_grad for each in node.outputs) else 0.0
        for name in returned & at.keys():
            self._last[at[name]] = count
        self.inside = numpy.concatenate([[0.0], numpy.cumsum(made)])
        self.largest = float(made.max(initial=0.0))
        self._places = self._narrow(count)

    def _narrow(self, count: int) -> list[int]:
        """Both ends, and places at which no more bytes cross than at their neighbours."""
        change = numpy.zeros(count + 2)
        for number in range(count):
            change[number + 1] += self._bytes[number]
            change[max(self._last[number], number) + 1] -= self._bytes[number]
        width = numpy.cumsum(change)[: count + 1]  # what is made before a place and read at it or after it
        inner = [
            place
            for place in range(1, count)
            if width[place] <= min(width[place - 1] if place > 1 else math.inf, width[place + 1])
        ]
        if len(inner) > MOST_PLACES:
            inner = sorted(sorted(inner, key=lambda place: width[place])[:MOST_PLACES])
        return [0, *inner, count]

    def cut(self, limit: float) -> tuple[float, list[int]]:
        """Bytes of the best segments of at most `limit` inside (borders plus the largest), and their ends."""
        places = self._places
        least = numpy.full(len(places), math.inf)
        least[0] = 0.0
        start_of = numpy.zeros(len(places), dtype=int)
        inside = self.inside[places]
        for end in range(1, len(places)):
            alive = self._bytes[: places[end]] * (self._last[: places[end]] >= places[end])
            before = numpy.concatenate([[0.0], numpy.cumsum(alive)])
            # made from each start on, and read after the end
            leaving = before[places[end]] - before[places[:end]]
            total = least[:end] + leaving
            fits = inside[end] - inside[:end] <= limit
            fits[end - 1] = True
            found = numpy.where(fits, total, math.inf)
            start_of[end] = int(found.argmin())
            least[end] = found[start_of[end]]
        ends = [len(places) - 1]
        while ends[-1]:
            ends.append(int(start_of[ends[-1]]))
        ends.reverse()
        most = max(float(inside[stop] - inside[start]) for start, stop in pairwise(ends))
        return IN_FLIGHT * float(least[-1]) + most, [places[end] for end in ends]

"""Finds runs of identical blocks of operators in a program.

Operators belong to a run because of what they compute and use, not because of the modules that they come
from:
operator i of a block uses what operator i of the block before uses, one block later, or the same value from
outside.

    ... b0 b1 b2 b3 b4 ... b97 b98 b99 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from meshloom.program.ir.nodes import Node, Ref, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import is_sparse, strides_of

NUM_TRIED_GAPS = 12  # most frequent distances between identical operators; a block has as many operators,
MULTIPLES = (1, 2, 3, 4, 6)  # or these times as many
_aten = torch.ops.aten
_JOINING = (_aten.stack.default, _aten.cat.default)
# positions of arguments that are indices: each step of a loop over time has its own
_INDEX_ARGUMENTS = {_aten.select.int: (2,), _aten.slice.Tensor: (2, 3)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of identical blocks. start: its first node. period: operators of a block.

    joined: offsets in a block of operators that stack or cat behind the run reads from all inner blocks.
    """

    start: int
    period: int
    num_blocks: int
    joined: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.num_blocks * self.period

    def first_of(self, block: int) -> int:
        return self.start + block * self.period


class OperandTable:
    """The nodes of a program, by what they compute and what they use.

    Values are numbers: nodes by their places, then variables and autocast regions. The operands of all nodes
    are one array, so that trying a period takes a few passes over it.
    """

    def __init__(self, program: Program, *, unique: Callable[..., Any]) -> None:
        """unique: a function whose calls are never identical to each other."""
        self._nodes = program.nodes
        kinds: dict[Any, int] = {}
        of_nodes = (_kind(node) if node.target is not unique else object() for node in program.nodes)
        self._kinds = numpy.array([kinds.setdefault(each, len(kinds)) for each in of_nodes], dtype=int)
        places = {node.name: place for place, node in enumerate(program.nodes)}
        numbers = dict(places)
        used: list[int] = []
        firsts = [0]
        for node in program.nodes:
            used.extend(numbers.setdefault(ref.name, len(numbers)) for ref in node.operands())
            used.extend(numbers.setdefault(name, len(numbers)) for name in _regions(node))
            firsts.append(len(used))
        self._used, self._firsts = numpy.array(used, dtype=int), numpy.array(firsts, dtype=int)
        # the node that uses what is at a place in `_used`
        self._user = numpy.repeat(numpy.arange(len(program.nodes)), numpy.diff(self._firsts))
        self.values = list(numbers)
        self.variables: dict[str, Any] = {
            each.value: each.meta
            for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
        }
        self.variables |= {
            name: object() if is_sparse(each) else (each.shape, each.dtype, strides_of(each))
            for name, each in program.constants.items()
        }
        self._order = numpy.argsort(self._used, kind="stable")  # all uses, value by value
        self._sorted = self._used[self._order]
        self._returned = sorted(places[ref.name] for ref in refs_in(program.outputs) if ref.name in places)
        self._updates = {places[ref.name] for ref in program.updates.values() if ref.name in places}

    def periods(self, *, min_blocks: int) -> list[int]:
        """Candidate numbers of operators in a block: frequent distances between identical operators, and
        multiples of these, because layers that alternate (two kinds of masks) form one block together."""
        order = numpy.argsort(self._kinds, kind="stable")
        gaps = numpy.diff(order)[numpy.diff(self._kinds[order]) == 0]
        counts = numpy.bincount(gaps, minlength=1)
        most_frequent = numpy.argsort(-counts, kind="stable")[:NUM_TRIED_GAPS].tolist()
        frequent = [gap for gap in most_frequent if counts[gap] >= min_blocks - 1]
        return list(dict.fromkeys(times * gap for times in MULTIPLES for gap in frequent))

    def runs(self, period: int, *, min_blocks: int) -> list[Run]:
        """Runs of at least `min_blocks` blocks of `period` operators."""
        repeats, latest = self._repeats(period)
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate([[False], repeats, [False]]).astype(int)))
        found: list[Run] = []
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if last - first < (min_blocks - 2) * period:
                continue
            start = first
            inside = first + numpy.flatnonzero(latest[first:last] >= first)
            for place in (*inside.tolist(), last):
                if place < last and latest[place] < start:
                    continue
                count = (place - start) // period + 1
                if count >= min_blocks and (joined := self._joined(start, period, count)) is not None:
                    found.append(Run(start=start, period=period, num_blocks=count, joined=joined))
                start = place + 1
        return found

    def variables_used(self, first: int, last: int) -> list[str]:
        """Parameters, buffers and constants that these nodes use, in the order of their use."""
        used = dict.fromkeys(self._used[self._firsts[first] : self._firsts[last]].tolist())
        return [name for name in map(self.values.__getitem__, used) if name in self.variables]

    def _repeats(self, period: int) -> tuple[Any, Any]:
        """Two arrays over nodes: whether the node one period later repeats it; the last node that both use.

        The other uses the same values from outside, or those one block later. A run in which both use a node
        begins behind that node.
        """
        count = max(len(self._kinds) - period, 0)
        repeats = self._kinds[:count] == self._kinds[period:]
        latest = numpy.full(count, -1)
        places = numpy.flatnonzero(repeats[self._user[: self._firsts[count]]])  # in `_used`: their operands
        users = self._user[places]
        one = self._used[places]
        other = self._used[places - self._firsts[users] + self._firsts[users + period]]
        nodes = len(self._kinds)
        same = (one == other) & (one < nodes)
        numpy.maximum.at(latest, users[same], one[same])
        moved = (one < nodes) & (other == one + period) & (users - one <= period)
        variables = (one >= nodes) & (other >= nodes) & (one != other)
        repeats[users[~(moved | (one == other) | variables)]] = False
        pairs: dict[tuple[int, int], bool] = {}
        for place in numpy.flatnonzero(variables).tolist():
            pair = int(one[place]), int(other[place])
            if pair not in pairs:
                pairs[pair] = self._are_counterparts(*pair, period)
            if not pairs[pair]:
                repeats[users[place]] = False
        return repeats, latest

    def _are_counterparts(self, one: int, other: int, period: int) -> bool:
        """Whether two variables have equal metadata, and the second is used a block later than the first."""
        first, second = self.values[one], self.values[other]
        if self.variables.get(first, second) != self.variables.get(second, second):
            return False
        return numpy.array_equal(self._users_of(one) + period, self._users_of(other))

    def _users_of(self, value: int) -> Any:
        first, last = numpy.searchsorted(self._sorted, [value, value + 1])
        return self._user[self._order[first:last]]

    def _joined(self, start: int, period: int, count: int) -> list[int] | None:
        """`Run.joined`; None if these blocks are no run, because nodes behind it use them otherwise, or
        because some update buffers and others do not."""
        first, last, end = start + period, start + (count - 1) * period, start + count * period
        if any(start <= place < last for place in self._returned):
            return None
        if any((place in self._updates) != (place + period in self._updates) for place in range(start, last)):
            return None
        behind = self._used[self._firsts[end] :]
        inside = (behind >= start) & (behind < last)
        if not numpy.any(inside):
            return []
        values, users = behind[inside], self._user[self._firsts[end] :][inside]
        if any(self._nodes[user].target not in _JOINING for user in set(users.tolist())):
            return None
        inner = values >= first
        uses: dict[int, list[tuple[int, int]]] = {}  # block -> (offset, user)
        for value, user in zip(values[inner].tolist(), users[inner].tolist(), strict=True):
            uses.setdefault((value - start) // period, []).append(((value - start) % period, user))
        if len(uses) not in (0, count - 2) or any(sorted(each) != sorted(uses[1]) for each in uses.values()):
            return None
        offsets = sorted({offset for offset, _ in uses.get(1, ())})
        return offsets if all(len(self._nodes[start + offset].outputs) == 1 for offset in offsets) else None


def _kind(node: Node) -> Any:
    """Equal for nodes that compute the same of their operands."""
    args = node.args
    if node.target in _INDEX_ARGUMENTS:
        args = tuple(
            None if place in _INDEX_ARGUMENTS[node.target] and not isinstance(each, Ref) else each
            for place, each in enumerate(args)
        )
    regions = tuple((each.device, each.dtype, each.enabled, each.cache) for each in node.context.autocast)
    kwargs = tuple((key, _typed(each)) for key, each in node.kwargs.items())
    kind = node.target, _typed(args), kwargs, node.outputs, node.context.grad, regions
    try:
        hash(kind)
    except TypeError:
        return object()
    return kind


def _typed(value: Any) -> Any:
    """Arguments without the names of values; 1 and 1.0 differ."""
    if isinstance(value, Ref):
        return Ref
    if isinstance(value, tuple):
        return tuple(_typed(each) for each in value)
    return type(value), value


def _regions(node: Node) -> list[str]:
    """Names for the autocast regions around a node, which no value has."""
    return [f"autocast {each.number}" for each in node.context.autocast]

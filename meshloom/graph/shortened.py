"""A program with four of a run of blocks that are alike, and from it what every operator of the whole program is found to be.

What is found by going through a program operator by operator is found of four blocks instead of a hundred: the first and the last have other neighbours
than the rest, and the two between them must be found alike, or the whole program is gone through.

    run         ... b0 b1 b2 b3 b4 ... b97 b98 b99 ...         b0 is b0; b1 to b98 are as b1, or b2; b99 is as b3
    shortened   ... b0 b1 b2 b3                    ...

Operators are in a run because of what they are and what they use, not because of the modules that they are in. Runs of runs are shortened one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy

from meshloom.graph.nodes import Node, Ref, refs_in
from meshloom.graph.program import Program
from meshloom.graph.sparse_constants import is_sparse, strides_of

T = TypeVar("T")
Names = Mapping[str, str]
FIRST, LIKE_OTHERS, LAST = 0, 1, 3  # of the blocks that are kept
NUM_KEPT = LAST + 1
LITTLE = 8  # one of so many operators less is not worth it
TRIED = 12  # lengths of a block,
TURNS = (1, 2, 3, 4, 6)  # and these times as many operators


def node_by_node(
    program: Program, find: Callable[[Program], Mapping[str, T]], renamed: Callable[[T, Names], T] = lambda found, _: found
) -> dict[str, T]:
    """What `find` finds for every node of a program, by name, where it may be given a shorter one.

    renamed: what was found for a node, with other values in it: value -> the one in its place. What has not its own name there stays.
    """
    short = shortened(program)
    if short is None:
        return dict(find(program))
    found = node_by_node(short.program, find, renamed)
    others = short.names(LIKE_OTHERS, LIKE_OTHERS + 1)
    if any(renamed(found[name], others) != found[others[name]] for name in short.block(LIKE_OTHERS)):
        return dict(find(program))
    last = short.names(LAST, short.num_blocks - 1)
    whole: dict[str, T] = {}
    for node in program.nodes[: short.start]:
        whole[node.name] = found[node.name]
    for number in range(short.num_blocks):
        source = FIRST if number == 0 else LAST if number == short.num_blocks - 1 else LIKE_OTHERS
        names = last if source == LAST else short.names(source, number)
        for one, name in zip(short.block(source), short.block(number), strict=True):
            whole[name] = renamed(found[one], names)
    for node in program.nodes[short.end :]:
        whole[node.name] = renamed(found[node.name], last)
    return whole


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """A program without most blocks of a run. whole: with all of them. start: where the run begins. period: operators of a block.

    variables: [block], the parameters, buffers and constants that only it uses, in the order of their use.
    """

    program: Program
    whole: Program
    start: int
    period: int
    num_blocks: int
    variables: Sequence[Sequence[str]]

    @property
    def end(self) -> int:
        """Where the run ends."""
        return self.start + self.num_blocks * self.period

    def block(self, number: int) -> list[str]:
        """Its nodes."""
        first = self.start + number * self.period
        return [node.name for node in self.whole.nodes[first : first + self.period]]

    def names(self, source: int, target: int) -> dict[str, str]:
        """Values of one block and of the one before it -> those in their place in another and in the one before that."""
        names: dict[str, str] = {}
        for back in (1, 0):
            if min(source, target) >= back:
                names.update(zip(self.block(source - back), self.block(target - back), strict=True))
                names.update(zip(self.variables[source - back], self.variables[target - back], strict=True))
        return names


def shortened(program: Program) -> Shortened | None:
    """The program without most blocks of the run that has most operators to leave out; None if there is none to speak of."""
    operators = _Operators(program)
    found: tuple[int, int, int] | None = None  # start, period, number of blocks
    most = len(program.nodes) // LITTLE
    for period in operators.periods():
        if found is not None and period % found[1] == 0:
            continue
        for start, count in operators.runs(period):
            if (count - NUM_KEPT) * period > most:
                found, most = (start, period, count), (count - NUM_KEPT) * period
    return operators.without(*found) if found is not None else None


class _Operators:
    """The nodes of a program by what they are and by what they use."""

    def __init__(self, program: Program) -> None:
        self._program = program
        kinds: dict[Any, int] = {}
        self._kinds = numpy.array([kinds.setdefault(_kind(node), len(kinds)) for node in program.nodes], dtype=int)
        self._operands = [[ref.name for ref in node.operands()] for node in program.nodes]
        self._place = {node.name: place for place, node in enumerate(program.nodes)}
        self._uses: dict[str, list[int]] = {}  # of variables and of autocast regions
        for place, node in enumerate(program.nodes):
            for name in (*(name for name in self._operands[place] if name not in self._place), *_regions(node)):
                self._uses.setdefault(name, []).append(place)
        self._metas: dict[str, Any] = {each.value: each.meta for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)}
        self._metas |= {name: object() if is_sparse(each) else (each.shape, each.dtype, strides_of(each)) for name, each in program.constants.items()}
        self._returned = sorted(self._place[ref.name] for ref in refs_in(program.outputs) if ref.name in self._place)
        self._updates = {self._place[ref.name] for ref in program.updates.values() if ref.name in self._place}

    def periods(self) -> list[int]:
        """How many operators blocks may have: as many as lie between some and the next that are the same, or few times as many.

        Layers that take turns in what they are given (masks) are one block together.
        """
        order = numpy.argsort(self._kinds, kind="stable")
        gaps = numpy.diff(order)[numpy.diff(self._kinds[order]) == 0]
        counts = numpy.bincount(gaps, minlength=1)
        frequent = [int(gap) for gap in numpy.argsort(-counts, kind="stable")[:TRIED] if counts[gap] >= NUM_KEPT]
        return list(dict.fromkeys(times * gap for times in TURNS for gap in frequent))

    def runs(self, period: int) -> list[tuple[int, int]]:
        """Where runs of blocks of so many operators begin, and how many blocks they have, if these are more than are kept."""
        same = numpy.concatenate([[False], self._kinds[:-period] == self._kinds[period:], [False]])
        edges = numpy.flatnonzero(same[1:] != same[:-1])
        found: list[tuple[int, int]] = []
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            start = first
            for place in range(first, last + 1):
                if place == last or not self._moves(place, period, start):
                    count = (place - start) // period + 1
                    if count > NUM_KEPT and self._is_left_at_its_end(start, period, count):
                        found.append((start, count))
                    start = place + 1
        return found

    def _moves(self, place: int, period: int, start: int) -> bool:
        """Whether an operator of a run uses what the one a block later uses, a block earlier, or the same from outside."""
        nodes = self._program.nodes
        pairs = zip(self._operands[place], self._operands[place + period], strict=True)
        regions = zip(_regions(nodes[place]), _regions(nodes[place + period]), strict=True)
        return all(self._is_pair(one, other, place, period, start) for one, other in chain(pairs, regions))

    def _is_pair(self, one: str, other: str, place: int, period: int, start: int) -> bool:
        made = self._place.get(one)
        if one == other:
            return made is None or made < start
        if made is not None:
            return self._place.get(other) == made + period and place - made <= period
        if other in self._place or self._metas.get(one, other) != self._metas.get(other, other):
            return False
        return self._uses[other] == [use + period for use in self._uses[one]]

    def _is_left_at_its_end(self, start: int, period: int, count: int) -> bool:
        """Whether nothing behind a run uses what lies before its last block, and blocks update buffers alike."""
        end = start + count * period
        used = chain(self._returned, (self._place.get(name, -1) for names in self._operands[end:] for name in names))
        if any(start <= place < end - period for place in used):
            return False
        return all((place in self._updates) == (place + period in self._updates) for place in range(start, end - period))

    def without(self, start: int, period: int, count: int) -> Shortened:
        """The program without the blocks of a run but for those that are kept."""
        program = self._program
        first, end = start + NUM_KEPT * period, start + count * period
        gone = {node.name for node in program.nodes[first:end]}
        variables: list[list[str]] = []
        for number in range(count):
            used = dict.fromkeys(chain.from_iterable(self._operands[start + number * period : start + (number + 1) * period]))
            variables.append([name for name in used if name in self._metas])
        shared = set(variables[0]).intersection(*variables[1:])  # what two use in the same place all do
        variables = [[name for name in names if name not in shared] for names in variables]
        names = {node.name: program.nodes[place].name for place, node in enumerate(program.nodes[end - period : end], first - period)}
        names |= zip(variables[-1], variables[LAST], strict=True)
        nodes = (*program.nodes[:first], *(_renamed_node(node, names) for node in program.nodes[end:]))
        unused = set(chain.from_iterable(variables[NUM_KEPT:])).difference(ref.name for node in nodes for ref in node.operands())
        short = replace(
            program,
            nodes=nodes,
            parameters={name: each for name, each in program.parameters.items() if each.value not in unused},
            buffers={name: each for name, each in program.buffers.items() if each.value not in unused},
            constants={name: each for name, each in program.constants.items() if name not in unused},
            outputs=_renamed(program.outputs, names),
            updates={name: ref for name, ref in program.updates.items() if ref.name not in gone},
            _runners={},
        )
        return Shortened(program=short, whole=program, start=start, period=period, num_blocks=count, variables=variables)


def _kind(node: Node) -> Any:
    """Equal for nodes that do the same with what they are given."""
    regions = tuple((each.device, each.dtype, each.enabled, each.cache) for each in node.context.autocast)
    kind = node.target, _typed(node.args), tuple((key, _typed(each)) for key, each in node.kwargs.items()), node.outputs, node.context.grad, regions
    try:
        hash(kind)
    except TypeError:
        return object()  # like no other
    return kind


def _typed(value: Any) -> Any:
    """Arguments without the names of values, 1 and 1.0 being different."""
    if isinstance(value, Ref):
        return Ref
    if isinstance(value, tuple):
        return tuple(_typed(each) for each in value)
    return type(value), value


def _regions(node: Node) -> list[str]:
    """Names of the autocast regions around a node; no value has such a name."""
    return [f"autocast {each.number}" for each in node.context.autocast]


def _renamed_node(node: Node, names: Names) -> Node:
    return replace(node, args=_renamed(node.args, names), kwargs={key: _renamed(each, names) for key, each in node.kwargs.items()})


def _renamed(value: Any, names: Names) -> Any:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return tuple(_renamed(each, names) for each in value) if isinstance(value, tuple) else value

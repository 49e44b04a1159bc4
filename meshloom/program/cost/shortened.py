"""A program with four of a run of blocks that are alike, and from it what every operator of the whole program
is found to be.

What is found by going through a program operator by operator is found of four blocks instead of a hundred:
the first and the last have other neighbours than the rest, and the two between them must be found alike, or
the whole program is gone through.

    run         ... b0 b1 b2 b3 b4 ... b97 b98 b99 ...         b0 is b0; b1 to b98 are as b1, or b2; b99 is as b3
    shortened   ... b0 b1 b2 b3                    ...

Operators are in a run because of what they are and what they use, not because of the modules that they are
in. Runs of runs are shortened one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from meshloom.program.ir.nodes import Node, Ref, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import is_sparse, strides_of

T = TypeVar("T")
Names = Mapping[str, str]
FIRST, LIKE_OTHERS, LAST = 0, 1, 3  # of the blocks that are kept
NUM_KEPT = LAST + 1
LITTLE = 8  # one of so many operators less is not worth it
TRIED = 12  # lengths of a block,
TURNS = (1, 2, 3, 4, 6)  # and these times as many operators
_aten = torch.ops.aten
_JOINING = (_aten.stack.default, _aten.cat.default)
# arguments that say which: a step of a loop over time has its own
_PICKING = {_aten.select.int: (2,), _aten.slice.Tensor: (2, 3)}


def node_by_node(
    program: Program,
    find: Callable[[Program], Mapping[str, T]],
    renamed: Callable[[T, Names], T] = lambda found, _: found,
) -> dict[str, T]:
    """What `find` finds for every node of a program, by name, where it may be given a shorter one.

    renamed: what was found for a node, with other values in it: value -> the one in its place. What has not
        its own name there stays.
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
    """A program without most blocks of a run. whole: with all of them. start: where the run begins. period:
    operators of a block.

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
        """Values of one block and of the one before it -> those in their place in another and in the one
        before that."""
        names: dict[str, str] = {}
        for back in (1, 0):
            if min(source, target) >= back:
                names.update(zip(self.block(source - back), self.block(target - back), strict=True))
                names.update(zip(self.variables[source - back], self.variables[target - back], strict=True))
        return names


def shortened(program: Program) -> Shortened | None:
    """The program without most blocks of the run that has most operators to leave out; None if there is none
    to speak of."""
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
    """The nodes of a program by what they are and by what they use.

    Values are numbers: nodes by their places, then variables and autocast regions. What all nodes use is one
    array, so that a period costs a few passes over it.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        kinds: dict[Any, int] = {}
        self._kinds = numpy.array(
            [kinds.setdefault(_kind(node), len(kinds)) for node in program.nodes], dtype=int
        )
        self._place = {node.name: place for place, node in enumerate(program.nodes)}
        numbers = dict(self._place)
        used: list[int] = []
        firsts = [0]
        for node in program.nodes:
            used.extend(numbers.setdefault(ref.name, len(numbers)) for ref in node.operands())
            used.extend(numbers.setdefault(name, len(numbers)) for name in _regions(node))
            firsts.append(len(used))
        self._used, self._firsts = numpy.array(used, dtype=int), numpy.array(firsts, dtype=int)
        # of what stands at a place in `_used`
        self._user = numpy.repeat(numpy.arange(len(program.nodes)), numpy.diff(self._firsts))
        self._names = list(numbers)
        self._metas: dict[str, Any] = {
            each.value: each.meta
            for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
        }
        self._metas |= {
            name: object() if is_sparse(each) else (each.shape, each.dtype, strides_of(each))
            for name, each in program.constants.items()
        }
        self._order = numpy.argsort(self._used, kind="stable")  # all uses, value by value
        self._sorted = self._used[self._order]
        self._returned = sorted(
            self._place[ref.name] for ref in refs_in(program.outputs) if ref.name in self._place
        )
        self._updates = {self._place[ref.name] for ref in program.updates.values() if ref.name in self._place}

    def periods(self) -> list[int]:
        """How many operators blocks may have: as many as lie between some and the next that are the same, or
        few times as many.

        Layers that take turns in what they are given (masks) are one block together.
        """
        order = numpy.argsort(self._kinds, kind="stable")
        gaps = numpy.diff(order)[numpy.diff(self._kinds[order]) == 0]
        counts = numpy.bincount(gaps, minlength=1)
        frequent = [
            int(gap) for gap in numpy.argsort(-counts, kind="stable")[:TRIED] if counts[gap] >= NUM_KEPT
        ]
        return list(dict.fromkeys(times * gap for times in TURNS for gap in frequent))

    def runs(self, period: int) -> list[tuple[int, int]]:
        """Where runs of blocks of so many operators begin, and how many blocks they have, if these are more
        than are kept."""
        moves, latest = self._moves(period)
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate([[False], moves, [False]]).astype(int)))
        found: list[tuple[int, int]] = []
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if last - first < (NUM_KEPT - 1) * period:
                continue
            start = first
            inside = first + numpy.flatnonzero(latest[first:last] >= first)
            for place in (*inside.tolist(), last):
                if place < last and latest[place] < start:
                    continue
                count = (place - start) // period + 1
                if count > NUM_KEPT and self._is_left_at_its_end(start, period, count):
                    found.append((start, count))
                start = place + 1
        return found

    def _moves(self, period: int) -> tuple[Any, Any]:
        """[place]: whether an operator uses what the one a block later uses, a block earlier, or the same
        from outside; and the last of the latter.

        A run in which that is so begins behind it.
        """
        count = max(len(self._kinds) - period, 0)
        moves = self._kinds[:count] == self._kinds[period:]
        latest = numpy.full(count, -1)
        places = numpy.flatnonzero(moves[self._user[: self._firsts[count]]])  # in `_used`, of what they use
        users = self._user[places]
        one, other = (
            self._used[places],
            self._used[places - self._firsts[users] + self._firsts[users + period]],
        )
        nodes = len(self._kinds)
        same = (one == other) & (one < nodes)
        numpy.maximum.at(latest, users[same], one[same])
        moved = (one < nodes) & (other == one + period) & (users - one <= period)
        given = (one >= nodes) & (other >= nodes) & (one != other)
        wrong = ~(moved | (one == other) | given)
        moves[users[wrong]] = False
        pairs: dict[tuple[int, int], bool] = {}
        for place in numpy.flatnonzero(given).tolist():
            pair = int(one[place]), int(other[place])
            if pair not in pairs:
                pairs[pair] = self._are_counterparts(*pair, period)
            if not pairs[pair]:
                moves[users[place]] = False
        return moves, latest

    def _are_counterparts(self, one: int, other: int, period: int) -> bool:
        """Whether two variables are alike, and the second is used where the first is, a block later."""
        first, second = self._names[one], self._names[other]
        if self._metas.get(first, second) != self._metas.get(second, second):
            return False
        return numpy.array_equal(self._uses(one) + period, self._uses(other))

    def _uses(self, value: int) -> Any:
        """The nodes that use it."""
        first, last = numpy.searchsorted(self._sorted, [value, value + 1])
        return self._user[self._order[first:last]]

    def _is_left_at_its_end(self, start: int, period: int, count: int) -> bool:
        """Whether nothing behind a run uses what lies before its last block but to join all of it, and blocks
        update buffers alike."""
        end = start + count * period
        if any(start <= place < end - period for place in self._returned):
            return False
        if any(
            (place in self._updates) != (place + period in self._updates)
            for place in range(start, end - period)
        ):
            return False
        return self._joined(start, period, count) is not None

    def _joined(self, start: int, period: int, count: int) -> list[int] | None:
        """Operators of a block, counted from its first, that nodes behind the run join: of all blocks but the
        outermost alike. None: they use others."""
        first, end = start + period, start + (count - 1) * period
        behind = self._used[self._firsts[end + period] :]
        if not numpy.any((behind >= start) & (behind < end)):
            return []
        users = self._user[self._firsts[end + period] :]
        chosen = (behind >= start) & (behind < end)
        values, users = behind[chosen], users[chosen]
        nodes = self._program.nodes
        if any(nodes[user].target not in _JOINING for user in set(users.tolist())):
            return None
        inner = (values >= first) & (values < end)
        uses: dict[int, list[tuple[int, int]]] = {}
        for value, user in zip(values[inner].tolist(), users[inner].tolist(), strict=True):
            uses.setdefault((value - start) // period, []).append(((value - start) % period, user))
        if len(uses) not in (0, count - 2) or any(sorted(each) != sorted(uses[1]) for each in uses.values()):
            return None
        offsets = sorted({offset for offset, _ in uses.get(1, ())})
        return offsets if all(len(nodes[start + offset].outputs) == 1 for offset in offsets) else None

    def without(self, start: int, period: int, count: int) -> Shortened:
        """The program without the blocks of a run but for those that are kept."""
        program = self._program
        first, end = start + NUM_KEPT * period, start + count * period
        variables: list[list[str]] = []
        for number in range(count):
            block = self._used[
                self._firsts[start + number * period] : self._firsts[start + (number + 1) * period]
            ].tolist()
            variables.append(
                [name for name in map(self._names.__getitem__, dict.fromkeys(block)) if name in self._metas]
            )
        shared = set(variables[0]).intersection(*variables[1:])  # what two use in the same place all do
        variables = [[name for name in names if name not in shared] for names in variables]
        names = {
            node.name: program.nodes[place].name
            for place, node in enumerate(program.nodes[end - period : end], first - period)
        }
        names |= zip(variables[-1], variables[LAST], strict=True)
        stand_ins: list[Node] = []
        for offset in self._joined(start, period, count) or ():
            like = program.nodes[start + LIKE_OTHERS * period + period + offset]
            last, kept = (
                program.nodes[end - period + offset].name,
                program.nodes[first - period + offset].name,
            )
            names[kept] = last  # the kept one is the last of them now, and what it was needs another name
            gone = [
                last,
                *(program.nodes[place + offset].name for place in range(first, end - period, period)),
            ]
            stand_ins += [
                replace(
                    like,
                    name=name,
                    target=stand_in,
                    args=(Ref(like.name),),
                    kwargs={},
                    draw=None,
                    num_draws=0,
                )
                for name in gone
            ]
        left = {node.name for node in program.nodes[first:end]}
        nodes = (
            *program.nodes[: first - period],
            *stand_ins,
            *program.nodes[first - period : first],
            *(_renamed_node(node, names) for node in program.nodes[end:]),
        )
        unused = set(chain.from_iterable(variables[NUM_KEPT:])).difference(
            ref.name for node in nodes for ref in node.operands()
        )
        short = replace(
            program,
            nodes=nodes,
            parameters={name: each for name, each in program.parameters.items() if each.value not in unused},
            buffers={name: each for name, each in program.buffers.items() if each.value not in unused},
            constants={name: each for name, each in program.constants.items() if name not in unused},
            outputs=_renamed(program.outputs, names),
            updates={name: ref for name, ref in program.updates.items() if ref.name not in left},
        )
        return Shortened(
            program=short, whole=program, start=start, period=period, num_blocks=count, variables=variables
        )


def stand_in(like: Tensor) -> Tensor:
    """Another value that lies in memory as this one does, here in the same. It takes a gradient, if this one
    does, and hands none on."""
    return _StandIn.apply(like)  # pyright: ignore[reportReturnType]


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor) -> Tensor:
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None


def _kind(node: Node) -> Any:
    """Equal for nodes that do the same with what they are given."""
    if node.target is stand_in:
        return object()  # like no other
    args = node.args
    if node.target in _PICKING:
        args = tuple(
            None if place in _PICKING[node.target] and not isinstance(each, Ref) else each
            for place, each in enumerate(args)
        )
    regions = tuple((each.device, each.dtype, each.enabled, each.cache) for each in node.context.autocast)
    kind = (
        node.target,
        _typed(args),
        tuple((key, _typed(each)) for key, each in node.kwargs.items()),
        node.outputs,
        node.context.grad,
        regions,
    )
    try:
        hash(kind)
    except TypeError:
        return object()
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
    return replace(
        node,
        args=_renamed(node.args, names),
        kwargs={key: _renamed(each, names) for key, each in node.kwargs.items()},
    )


def _renamed(value: Any, names: Names) -> Any:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return tuple(_renamed(each, names) for each in value) if isinstance(value, tuple) else value

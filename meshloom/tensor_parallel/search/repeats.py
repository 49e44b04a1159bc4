"""Repeated blocks of a program, which share their decisions.

`blocks.0`, `blocks.1`, ... whose forwards run the same operators on the same shapes are one block that
repeats, and so are the iterations of a loop (`iterations.py`). Every node, parameter and axis of a later
block is represented by its counterpart in the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshloom.program.cost.iterations import constants_of, iterations_of
from meshloom.program.ir.nodes import Node, Ref
from meshloom.tensor_parallel.layout.axes import Axis
from meshloom.tensor_parallel.layout.cuts import StripNumbers
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import Cut, Part, Placement
from meshloom.tensor_parallel.search.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """values: value (node, parameter or buffer) -> its representative. axes: the same for numbers of axes.
    All others represent themselves."""

    values: Mapping[str, str] = field(default_factory=dict[str, str])
    axes: Mapping[int, int] = field(default_factory=dict[int, int])

    def value(self, name: str) -> str:
        """The representative of a value."""
        return self.values.get(name, name)

    def axis(self, number: int) -> int:
        """The representative of an axis."""
        return self.axes.get(number, number)


def repeats_of(
    layout: Layout, numbers: StripNumbers, marks: Mapping[str, object] | None = None, loops: bool = True
) -> Repeats:
    """The repeated blocks of a program. If counterparts do not match, blocks represent themselves.

    marks: of values; values with different marks are no counterparts. loops: iterations are blocks, too.
    """
    for joined in (True, False):
        found = _found(layout, numbers, marks or {}, joined=joined, loops=loops)
        if not any(_collapses(each, found.axes, numbers) for each in layout.values.values()):
            return found
    return Repeats()


def _found(
    layout: Layout, numbers: StripNumbers, marks: Mapping[str, object], *, joined: bool, loops: bool
) -> Repeats:
    """The repeats, unchecked. joined: if the output of a block, with an axis of its own, is the input of the
    next, all these axes are one.

    0 -> block -> 1 -> block -> 2        0 represents 1 as an input, and 1 represents 2 as an output: so 0 represents both
    """
    values: dict[str, str] = {}
    axes: dict[int, int] = {}

    def add(blocks: Iterable[Sequence[tuple[Node, str]]]) -> None:
        # the first block of each kind: layers of two kinds may alternate
        kinds: list[Sequence[tuple[Node, str]]] = []
        for block in blocks:
            for first in kinds:
                found = _match(layout, numbers, first, block, marks)
                if found is None:
                    continue
                new_values, new_axes = found
                if joined:
                    for number, counterpart in new_axes.items():
                        _join(axes, number, counterpart)
                elif _agree(axes, new_axes):
                    axes.update(new_axes)
                else:
                    continue
                values.update((name, other) for name, other in new_values.items() if name != other)
                break
            else:
                kinds.append(block)

    for blocks in _containers(layout.program.nodes).values():
        add(blocks[index] for index in sorted(blocks))
    if loops:
        for iterations in iterations_of([node for node in layout.program.nodes if node.name not in values]):
            add([(node, node.path) for node in nodes] for nodes in iterations)
    moved = {number: _end(axes, number) for number in axes}
    return Repeats(
        values={name: values.get(other, other) for name, other in values.items()},
        axes={number: other for number, other in moved.items() if number != other},
    )


def _agree(known: Mapping[int, int], new: Mapping[int, int]) -> bool:
    """Whether every axis has one counterpart, and no axis is, by way of others, its own: blocks that use two axes the other
    way round have none that represents them."""
    if any(known.get(number, counterpart) != counterpart for number, counterpart in new.items()):
        return False
    both = {**known, **new}
    for number in new:
        passed = {number}
        while both.get(number, number) != number:
            number = both[number]
            if number in passed:
                return False
            passed.add(number)
    return True


def _end(axes: Mapping[int, int], number: int) -> int:
    while axes.get(number, number) != number:
        number = axes[number]
    return number


def _join(axes: dict[int, int], one: int, other: int) -> None:
    """Gives two axes a common representative: the smaller of theirs."""
    first, second = sorted((_end(axes, one), _end(axes, other)))
    axes[second] = first


def _containers(nodes: Sequence[Node]) -> dict[str, dict[int, list[tuple[Node, str]]]]:
    """Container -> block number -> its nodes, with their paths in the block. Only the outermost number in a
    path counts."""
    found: dict[str, dict[int, list[tuple[Node, str]]]] = {}
    for node in nodes:
        parts = node.path.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            inner = ".".join(parts[place + 1 :])
            found.setdefault(".".join(parts[:place]), {}).setdefault(int(parts[place]), []).append(
                (node, inner)
            )
    return {name: blocks for name, blocks in found.items() if len(blocks) > 1}


def _match(
    layout: Layout,
    numbers: StripNumbers,
    first: Sequence[tuple[Node, str]],
    other: Sequence[tuple[Node, str]],
    marks: Mapping[str, object],
) -> tuple[dict[str, str], dict[int, int]] | None:
    """The counterparts in `first` of the values and axes of `other`."""
    if len(first) != len(other):
        return None
    values: dict[str, str] = {}
    axes: dict[int, int] = {}
    paired: set[tuple[int, int]] = set()
    for (one, one_path), (two, two_path) in zip(first, other, strict=True):
        if (
            one_path != two_path
            or one.target is not two.target
            or one.outputs != two.outputs
            or one.context.grad != two.context.grad
        ):
            return None
        if constants_of(one) != constants_of(two):
            return None
        pairs = [*zip(one.operands(), two.operands(), strict=True), (Ref(one.name), Ref(two.name))]
        for mine, theirs in pairs:
            if layout.metas[mine.name] != layout.metas[theirs.name] or marks.get(mine.name) != marks.get(
                theirs.name
            ):
                return None
            inside = theirs.name == two.name or theirs.name in values or theirs.name.startswith(("p_", "b_"))
            if inside and values.setdefault(theirs.name, mine.name) != mine.name:
                return None
        tensors = zip(
            (axes for mine, _ in pairs for axes in layout.values[mine.name]),
            (axes for _, theirs in pairs for axes in layout.values[theirs.name]),
            strict=True,
        )
        for mine_axes, their_axes in tensors:
            for mine_axis, their_axis in zip(mine_axes, their_axes, strict=True):
                pair = id(mine_axis), id(their_axis)
                if pair not in paired and not _pair(mine_axis, their_axis, numbers, axes):
                    return None
                paired.add(pair)
        mapped = layout.mapped.get(one.name), layout.mapped.get(two.name)
        if mapped[0] is not None and mapped[1] is not None:
            for label, axis in mapped[0].labels.items():
                if not _pair(axis, mapped[1].labels[label], numbers, axes):
                    return None
    return values, axes


def _pair(mine: Axis, theirs: Axis, numbers: StripNumbers, axes: dict[int, int]) -> bool:
    leaves = list(mine.leaves()), list(theirs.leaves())
    if [_stretch(leaf) for leaf in leaves[0]] != [_stretch(leaf) for leaf in leaves[1]]:
        return False
    pairs = [
        (numbers.of[one.strip], numbers.of[two.strip])
        for one, two in zip(*leaves, strict=True)
        if one.strip.size > 1
    ]
    return all(axes.setdefault(two, one) == one for one, two in pairs)


def _stretch(leaf: Axis) -> tuple[int, int, int]:
    return leaf.strip.size, leaf.start, leaf.size


def _collapses(tensors: Sequence[Sequence[Axis]], moved: Mapping[int, int], numbers: StripNumbers) -> bool:
    """Whether two axes of one value would have the same representative."""
    for axes in tensors:
        found = {number for axis in axes for number in numbers.leaves(axis)}
        if len({moved.get(number, number) for number in found}) != len(found):
            return True
    return False


class UnlikeBlocksError(Exception):
    """Equal blocks have unequal options."""


class Representatives:
    """What each value, cut, placement and strategy of a program with repeated blocks is represented by.

    Raises `UnlikeBlocksError` if a cut has no counterpart in the block that represents it.
    """

    def __init__(
        self, layout: Layout, numbers: StripNumbers, cuts: Mapping[int, list[Cut]], repeats: Repeats
    ) -> None:
        self.value = repeats.value
        self._layout = layout
        self._numbers = numbers
        self._cut_of: dict[Cut, Cut] = {}  # cut -> its representative
        self._represented: dict[Cut, list[Cut]] = {}  # the inverse
        known = {frozenset(cut.parts.items()): cut for each in cuts.values() for cut in each}
        for cut in known.values():
            parts = frozenset((repeats.axis(number), intervals) for number, intervals in cut.parts.items())
            representative = known.get(parts)
            if representative is None or len(representative.parts) != len(cut.parts):
                raise UnlikeBlocksError
            self._cut_of[cut] = representative
            self._represented.setdefault(representative, []).append(cut)

    def placement(self, placement: Placement) -> Placement:
        """The placement that represents this one."""
        if not isinstance(placement, Part) or placement.cut is None:
            return placement
        return Part(self._cut_of[placement.cut])

    def placement_in(self, value: str, placement: Placement) -> Placement:
        """The placement of a value that has the same representative as `placement`."""
        if not isinstance(placement, Part) or placement.cut is None:
            return placement
        numbers = frozenset[int]().union(
            *(self._numbers.leaves(axis) for axes in self._layout.values[value] for axis in axes)
        )
        cuts = self._represented[self._cut_of[placement.cut]]
        return next((Part(cut) for cut in cuts if numbers & cut.parts.keys()), placement)

    def strategy(self, strategy: Strategy) -> Hashable:
        """What represents a strategy: equal for those of nodes that represent each other."""
        return (
            tuple(map(self.placement, strategy.operands)),
            self.placement(strategy.output),
            strategy.work,
            self._cut_of[strategy.cut] if strategy.cut is not None else None,
            strategy.collectives,
        )

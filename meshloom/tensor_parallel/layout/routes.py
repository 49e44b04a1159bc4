"""Rows that data sends to groups, as tokens are sent to experts: whose a row is, is known only when the
program runs.

    w[ids]              w [e, k, n], ids [s]: the matrix of each row's expert
    grouped product     x [s, k] sorted by expert, w [e, k, n], ends [e]: where each expert's rows end

If the ranks divide the experts, each works on the rows that are sent to its own: the axis s goes where the
axis e goes. How many rows these are differs from chunk to chunk and from rank to rank; what is told of them
beforehand (prices, memory, shapes in a program) is what is expected where every expert gets as many rows as
any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.axes import Axis, Key
from meshloom.tensor_parallel.layout.unify import unify
from meshloom.tensor_parallel.rules.factors import Factors

# What works on however many rows there are, though a part's sizes are among its arguments: those of other
# dims, or -1.
ANY_ROWS = frozenset(
    {"view", "reshape", "_unsafe_view", "expand", "squeeze", "chunk", "split", "split_with_sizes", "slice"}
)


@dataclass(frozen=True, kw_only=True)
class Route:
    """rows: axis of which every index is sent to one of the axis `groups`. value: integers that say to which.

    is_sorted: rows lie sorted by group, and the value says where each group's end; else it says every row's
        group.
    after: number of the node that makes the value; nothing before it can know its rows. path: module in which
    rows are looked up; what lies around it works on all rows.
    """

    rows: Axis
    groups: Axis
    value: str
    is_sorted: bool
    after: int
    path: str

    def reaches(self, number: int, path: str) -> bool:
        """Whether a node may work on the rows that are sent to a rank. number, path: of the node."""
        return number > self.after and (
            not self.path or path == self.path or path.startswith(f"{self.path}.")
        )


class RoutedNode(Protocol):
    """A node with its factor map, as a layout has it."""

    @property
    def node(self) -> Node:
        """What is computed."""
        ...

    @property
    def factors(self) -> Factors:
        """Its factor map."""
        ...

    @property
    def labels(self) -> Mapping[str, Axis]:
        """The axis that each label of the map is."""
        ...


def key_of(axis: Axis) -> tuple[Key, ...]:
    """What an axis is made of: equal for axes that are the same product."""
    return tuple(leaf.key for leaf in axis.leaves())


def routes_of(program: Program, mapped: Mapping[str, RoutedNode]) -> tuple[Route, ...]:
    """The routes of a program. Parameters that are looked up by the same value have one axis of groups."""
    numbers = {node.name: number for number, node in enumerate(program.nodes)}
    lookups = list(_lookups(program, mapped))
    found: list[Route] = []
    # a table of vectors alone is an embedding
    for value in dict.fromkeys(ref for ref, _, is_matrix in lookups if is_matrix):
        same = [each for ref, each, _ in lookups if ref == value]
        first = same[0]
        routed = first.factors.routed
        assert routed is not None
        groups = first.labels[routed.groups]
        for other in same[1:]:
            if other.factors.routed is not None:
                unify(groups, other.labels[other.factors.routed.groups])
        path = _common([each.node.path for each in same])
        found.append(
            Route(
                rows=first.labels[routed.rows],
                groups=groups,
                value=value,
                is_sorted=routed.is_sorted,
                after=numbers.get(value, -1),
                path=path,
            )
        )
    return tuple(found)


def _lookups(program: Program, mapped: Mapping[str, RoutedNode]) -> Iterator[tuple[str, RoutedNode, bool]]:
    """Value that says whose a row is, the node that looks a parameter up by it, and whether that has a matrix
    (or more) for each group."""
    held = {each.value for each in program.parameters.values()}
    for node in program.nodes:
        operands = [ref.name for ref in node.operands()]
        if len(operands) == 1 and operands[0] in held:
            held.add(node.name)  # a view of it, or a cast one
        each = mapped.get(node.name)
        if (
            each is not None
            and (routed := each.factors.routed) is not None
            and operands[routed.table] in held
        ):
            yield operands[routed.by], each, len(each.factors.operands[routed.table]) > 2


def _common(paths: Sequence[str]) -> str:
    """The innermost module around all of them."""
    parts = [path.split(".") for path in paths]
    count = next(
        (place for place, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1),
        min(map(len, parts)),
    )
    return ".".join(parts[0][:count])

"""Routes: rows that data assigns to groups, as tokens to experts. Which rows a group has is known at run time
only.

    w[ids]              w [e, k, n], ids [s]: the matrix of each row's expert
    grouped product     x [s, k] sorted by expert, w [e, k, n], ends [e]: where each expert's rows end

If the experts are sharded, each rank computes the rows that are routed to its experts: axis s is sharded as
axis e is. The number of these rows varies from chunk to chunk and from rank to rank. Costs, memory and the
shapes in a program assume that every expert gets equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.axes import Axis, Key
from meshloom.tensor_parallel.layout.unify import unify
from meshloom.tensor_parallel.rules.factors import Factors

# Operators that work on any number of rows, because the sizes among their arguments are those of other dims,
# or -1.
ANY_ROWS = frozenset(
    {"view", "reshape", "_unsafe_view", "expand", "squeeze", "chunk", "split", "split_with_sizes", "slice"}
)


@dataclass(frozen=True, kw_only=True)
class Route:
    """rows: the axis whose indices are assigned to those of axis `groups`. value: the integers that assign
    them.

    is_sorted: rows are sorted by group, and `value` has the end of each group; otherwise it has the group of
        each row.
    after: number of the node that computes `value`; earlier nodes cannot know the rows.
    path: module in which rows are looked up; nodes outside of it compute all rows.
    """

    rows: Axis
    groups: Axis
    value: str
    is_sorted: bool
    after: int
    path: str

    def reaches(self, number: int, path: str) -> bool:
        """Whether the node `number` of module `path` may compute only the rows that are routed to a rank."""
        return number > self.after and (
            not self.path or path == self.path or path.startswith(f"{self.path}.")
        )


@dataclass(frozen=True, kw_only=True)
class MappedNode:
    """A node with its factor map. labels: label -> axis. unsharded: labels that must not be sharded, also
    because dims did not match."""

    node: Node
    factors: Factors
    labels: Mapping[str, Axis]
    unsharded: frozenset[str]
    # pairs of labels that may share an axis, because they never occur in one tensor's dims as factors of each
    # other
    exclusive: frozenset[frozenset[str]]


def key_of(axis: Axis) -> tuple[Key, ...]:
    """The keys of an axis's leaves: equal for axes that are the same product."""
    return tuple(leaf.key for leaf in axis.leaves())


def routes_of(program: Program, mapped: Mapping[str, MappedNode]) -> tuple[Route, ...]:
    """The routes of a program. Parameters that are looked up by the same value share the axis of groups."""
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


def _lookups(program: Program, mapped: Mapping[str, MappedNode]) -> Iterator[tuple[str, MappedNode, bool]]:
    """For every lookup in a parameter: the value that assigns rows, the node, and whether each group's entry
    is a matrix or larger."""
    held = {each.value for each in program.parameters.values()}
    for node in program.nodes:
        operands = [ref.name for ref in node.operands()]
        if len(operands) == 1 and operands[0] in held:
            held.add(node.name)  # a view or cast of it
        each = mapped.get(node.name)
        if (
            each is not None
            and (routed := each.factors.routed) is not None
            and operands[routed.table] in held
        ):
            yield operands[routed.by], each, len(each.factors.operands[routed.table]) > 2


def _common(paths: Sequence[str]) -> str:
    """The innermost module that contains all paths."""
    parts = [path.split(".") for path in paths]
    count = next(
        (place for place, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1),
        min(map(len, parts)),
    )
    return ".".join(parts[0][:count])

"""The uses of parameters: along which axes operators sum, look up or attend, and which operators need a
parameter in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshloom.program.ir.nodes import Node, operator_name, users_by_value
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.cuts import StripNumbers
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import Cut, Placement
from meshloom.tensor_parallel.rules.factors import labels_in
from meshloom.tensor_parallel.search.strategies import strategies_of


class Uses:
    """The uses of a program's parameters. users: value -> nodes with it as an operand, in order. heads: axes
    that attention treats separately.

    experts: axes of parameters along which a node selects one entry, or computes all of them separately.
    """

    def __init__(self, layout: Layout, numbers: StripNumbers, cuts: Mapping[int, list[Cut]]) -> None:
        self._layout = layout
        self._numbers = numbers
        self._cuts = cuts
        self.users = users_by_value(layout.program.nodes)
        self.heads = self._heads()
        self.experts = self._experts()

    def sides(self, value: str, module: str = "") -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """The axes of a parameter that its uses sum over, those that the results have, and those that are
        looked up.

        module: only uses in this module count, if there are any.
        """
        inner, outer, looked_up = set[int](), set[int](), set[int]()
        for node, place in self._meetings(value, module):
            mapped = self._layout.mapped[node.name]
            routed = mapped.factors.routed
            for label in (label for term in mapped.factors.operands[place] for label in labels_in(term)):
                if routed is not None and label == routed.groups:
                    continue
                leaves = self._numbers.leaves(mapped.labels[label])
                if label in mapped.factors.sums:
                    inner |= leaves
                    looked_up |= leaves if node.operator.startswith("embedding") else set()
                else:
                    outer |= leaves
        return frozenset(inner), frozenset(outer - inner), frozenset(looked_up)

    def blocking(self, value: str, placement: Placement) -> Node | None:
        """The first node that uses a value and has no strategy with this placement. None: all have one."""
        for node in self.users.get(value, []):
            places = [place for place, ref in enumerate(node.operands()) if ref.name == value]
            ways = strategies_of(node, self._layout, self._numbers, self._cuts)
            if not any(each.operands[place] == placement for each in ways for place in places):
                return node
        return None

    def _meetings(self, value: str, module: str) -> list[tuple[Node, int]]:
        """The nodes that combine a parameter, or a view of it, with other values, with its operand number."""
        pending, found = [value], list[tuple[Node, int]]()
        while pending:
            name = pending.pop(0)
            for node in self.users.get(name, []):
                mapped = self._layout.mapped.get(node.name)
                operands = [ref.name for ref in node.operands()]
                if mapped is None:
                    continue
                if len(operands) == 1 and not mapped.factors.sums:
                    pending.append(node.name)
                else:
                    found += [(node, place) for place, each in enumerate(operands) if each == name]
        return [each for each in found if each[0].path == module] or found

    def _heads(self) -> frozenset[int]:
        found = set[int]()
        targets = _targets(self._layout.program, ("attention", "matmul", "bmm"))
        for node in self._layout.program.nodes:
            if node.target in targets and node.name in self._layout.mapped:
                for ref in node.operands():
                    axes = self._layout.values[ref.name][0]
                    if len(axes) > 3:
                        found |= self._numbers.leaves(axes[-3])
        return frozenset(found)

    def _experts(self) -> frozenset[int]:
        found = {number for route in self._layout.routes for number in self._numbers.leaves(route.groups)}
        held = {each.value for each in self._layout.program.parameters.values()}
        targets = _targets(self._layout.program, ("matmul", "bmm", "einsum", "_grouped_mm"))
        for node in self._layout.program.nodes:
            operands = [ref.name for ref in node.operands()]
            if held.isdisjoint(operands):
                continue
            if len(operands) == 1 and operands[0] in held:
                held.add(node.name)  # a view or cast of it
            mapped = self._layout.mapped.get(node.name)
            if mapped is None or node.target not in targets:
                continue
            labels = [
                {term for term in dims if isinstance(term, str)}
                for dims in (*mapped.factors.operands, *mapped.factors.outputs)
            ]
            for place, name in enumerate(operands):
                if name in held and len(mapped.factors.operands[place]) > 2:
                    # in all operands and the result: a separate product for each index
                    for label in set.intersection(*labels):
                        found |= self._numbers.leaves(mapped.labels[label])
        return frozenset(found)


def _targets(program: Program, names: Sequence[str]) -> set[Any]:
    """The operators of a program whose names contain one of `names`."""
    targets = {node.target for node in program.nodes}
    return {target for target in targets if any(name in operator_name(target) for name in names)}

"""The options of a division: the placements that each graph input may have, and the strategies of each node.

Graph inputs are a program's parameters, buffers, inputs and constants.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from meshloom.comm.pieces import Pieces
from meshloom.core.errors import PlanError
from meshloom.program.ir.nodes import Node
from meshloom.tensor_parallel.layout.cuts import StripNumbers, covers, pieces_of
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import INVARIANT, REPLICATED, Cut, Part, Placement, cut_of
from meshloom.tensor_parallel.search.pins import Pins
from meshloom.tensor_parallel.search.strategies import Strategy, cuts_of, facts_of_strategies, strategies_of

# parameter or buffer -> what each rank holds, and whether its gradient is complete on every rank
Held = Mapping[str, tuple[Pieces, bool]]


class Options:
    """The options of one program's graph inputs and nodes.

    held: the shards of parameters and buffers, where they are fixed. pins: what the plan fixes.
    inputs: the graph inputs, parameters first. names: value of a parameter or buffer -> its name.
    in_place: values of buffers that the program updates in place.
    """

    def __init__(
        self,
        layout: Layout,
        numbers: StripNumbers,
        cuts: Mapping[int, list[Cut]],
        num_ranks: int,
        *,
        held: Held | None,
        pins: Pins | None,
    ) -> None:
        program = layout.program
        self.layout = layout
        self.parameters = {each.value: name for name, each in program.parameters.items()}
        buffers = {each.value: name for name, each in program.buffers.items()}
        fixed = {*buffers, *(each.value for each in program.inputs), *program.constants}
        self.names = self.parameters | buffers
        self.inputs = list(dict.fromkeys([*self.parameters, *sorted(fixed)]))
        self.in_place = {program.buffers[name].value for name in program.in_place}
        self._numbers = numbers
        self._cuts = cuts
        self._num_ranks = num_ranks
        self._held = held
        self._pins = pins
        self._strategies: dict[Hashable, list[Strategy]] = {}
        # Values that depend on parameters: nothing else is worth sharding.
        self._dependent = set(self.names)
        for node in program.nodes:
            trained = any(output.requires_grad for output in node.outputs)
            if trained or any(ref.name in self._dependent for ref in node.operands()):
                self._dependent.add(node.name)

    def placements(self, value: str) -> list[Placement]:
        """The placements that a graph input may have. Raises `PlanError` if a held shard is not among
        them."""
        axes, meta = self.layout.values[value][0], self.layout.metas[value][0]
        is_free = value in self.parameters or value in self.in_place
        held = self._held.get(self.names[value]) if self._held is not None and value in self.names else None
        options: list[Placement] = [INVARIANT]
        if is_free or (held is not None and not held[0].is_whole):
            options += [REPLICATED] if meta.requires_grad else []
            options += [
                Part(cut)
                for cut in cuts_of(axes, self._numbers, self._cuts)
                if covers(axes, cut, self._numbers)
            ]
        if held is None:
            return self._pins.allowed(value, options) if is_free and self._pins else options
        options = [
            each
            for each in options
            if pieces_of(axes, cut_of(each), self._numbers, self._num_ranks) == held[0]
            and (not meta.requires_grad or (each == INVARIANT) == held[1])
        ]
        if not options:
            raise PlanError(
                f"This batch's program cannot be divided like the first one: {self.names[value]} is sharded differently. Keep shapes, or use tp=1."
            )
        return options

    def strategies(self, node: Node) -> list[Strategy]:
        """The strategies of a node; one object for all nodes that differ in values alone, as in a loop's
        iterations."""
        is_dependent = node.name in self._dependent
        key = facts_of_strategies(node, self.layout, self._numbers, is_dependent=is_dependent) or node.name
        if key not in self._strategies:
            self._strategies[key] = [
                each
                for each in strategies_of(node, self.layout, self._numbers, self._cuts)
                if is_dependent or each.output is INVARIANT
            ]
        return self._strategies[key]

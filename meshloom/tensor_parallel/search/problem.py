"""The ways to divide a program, and what each of them costs.

Every parameter has one of its placements, every node is computed in one of its ways. A value that is wanted
in another placement than it is made in is changed, once for all nodes that want it so. Blocks that are alike
share their unknowns, which then cost as often as they occur.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from meshloom.comm.pieces import Pieces
from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes
from meshloom.program.cost.cost import Cost
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.nodes import Node
from meshloom.tensor_parallel.layout.cuts import candidates, covers, numbers_of, pieces_of, route_of
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Cut,
    Part,
    Placement,
    cut_of,
)
from meshloom.tensor_parallel.layout.sections import Sections
from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.cheapest import cheapest
from meshloom.tensor_parallel.search.memory_limit import LimitError, cheapest_within
from meshloom.tensor_parallel.search.milp import SECONDS, OutOfTimeError
from meshloom.tensor_parallel.search.pins import Pins
from meshloom.tensor_parallel.search.price import change_seconds, holding_seconds, kind_of, talk_seconds
from meshloom.tensor_parallel.search.repeats import Repeats, UnlikeBlocksError, counterparts, repeats_of
from meshloom.tensor_parallel.search.saved_for_backward import HELD_COPIES, kept_operands, kept_within
from meshloom.tensor_parallel.search.shared_change import Change
from meshloom.tensor_parallel.search.strategies import Strategy, cuts_of, facts_of_ways, strategies_of

# parameter or buffer -> who holds what, and whether its gradient is whole on every rank
Held = Mapping[str, tuple[Pieces, bool]]


class NoWayError(PlanError):
    """What is asked for cannot be had together."""


class Problem:
    """The ways to divide a program, with what they cost.

    costs: of its nodes; none: ways are only counted, and cannot be compared.
    alike: blocks that are alike are divided alike. It makes the problem smaller, and leaves out ways in which
        what lies around a block would have to follow one axis of it where another stands for it.
    """

    def __init__(
        self,
        layout: Layout,
        num_ranks: int,
        *,
        rates: Rates,
        costs: Mapping[str, Cost] | None = None,
        held: Held | None = None,
        pins: Mapping[str, str] | None = None,
        alike: bool = True,
    ) -> None:
        self.layout = layout
        self.num_ranks = num_ranks
        self.rates = rates
        self.costs = costs
        self.held = held
        self.numbers = numbers_of(layout)
        self.cuts: dict[int, list[Cut]] = {}
        for cut in candidates(layout, self.numbers, num_ranks):
            for number in cut.parts:
                self.cuts.setdefault(number, []).append(cut)
        self._sections = Sections(self.numbers, self.cuts, num_ranks)
        self._seconds_of: dict[Any, float | None] = {}  # what a change is -> what it takes
        self.pins = Pins(layout, self.numbers, self.cuts, num_ranks, pins or {})
        self._kept_at, self._kept_inside = (
            (kept_operands(layout, costs), kept_within(layout, costs)) if costs else ({}, {})
        )
        self.alike = alike
        for loops in (True, False) if alike else ():
            try:
                self._state(repeats_of(layout, self.numbers, self.pins.marks, loops))
                return
            except UnlikeBlocksError:  # alike, but what is decided of them is not
                pass
        self._state(Repeats())

    def solve(self, memory_bytes: float | None = None) -> tuple[list[int], float, bool]:
        """Which of its options each variable and node takes, in order, what that costs, and whether it is
        known that nothing costs less.

        memory_bytes: what a rank may hold.

        Raises `NoWayError` if there is no way, `PlanError` if none fits.
        """
        own = [np.array([self.cost[unknown] for unknown in row]) for row in self.choices]
        if memory_bytes is None:
            try:
                found = cheapest(own, self.changes)
            except OutOfTimeError:
                raise PlanError(
                    f"No way to divide this program over tp={self.num_ranks} as asked for was found in {SECONDS:.0f} s. {self.pins.way_out()}"
                ) from None
        else:
            own_bytes = [
                np.array([self._memory.get(unknown, 0.0) for unknown in row]) for row in self.choices
            ]
            try:
                found = cheapest_within(own, self.changes, own_bytes, self.change_bytes, memory_bytes)
            except LimitError as error:
                raise PlanError(
                    f"With tp={self.num_ranks} a rank holds {format_bytes(error.least)} or more of parameters, gradients, optimizer state and kept activations, "
                    f"and the limit is {format_bytes(memory_bytes)}. Use a larger tp, or smaller microbatches."
                ) from None
        if found is None:
            raise NoWayError(
                f"There is no way to divide this program over tp={self.num_ranks} as asked for. {self.pins.way_out()}"
            )
        taken = {row[value] for row, value in zip(self.choices, found.values, strict=True)}
        options = (*self.options.values(), *self.strategies.values())
        return (
            [next(place for place, (_, unknown) in enumerate(row) if unknown in taken) for row in options],
            found.total,
            found.is_proved,
        )

    def _state(self, repeats: Repeats) -> None:
        """Unknowns, and what holds between them."""
        program, layout = self.layout.program, self.layout
        self.cost: list[float] = []  # of every unknown: seconds, if it is taken
        self.choices: list[list[int]] = []  # unknowns of which one is taken
        self._memory: dict[int, float] = {}  # unknown -> bytes that a rank holds because of it
        self.repeats = repeats
        self._stands = counterparts(self.cuts, repeats)
        self._stood_for: dict[Cut, list[Cut]] = {}
        for cut, other in self._stands.items():
            self._stood_for.setdefault(other, []).append(cut)
        self._count = Counter(repeats.value(value) for value in layout.values)
        self._made: dict[str, dict[Placement, list[int]]] = {}  # value -> placement it is made in -> unknowns
        # -> node that wants it -> unknowns
        self._wanted: dict[tuple[str, Placement], dict[str, dict[int, None]]] = {}
        self._pieces_of: dict[tuple[str, Placement], Pieces] = {}
        self._largest_of: dict[tuple[str, Placement], float] = {}
        self.changes: list[Change] = []
        # [values of source, targets] of each change: what is kept because of it
        self.change_bytes: list[Floats] = []
        self._users: dict[str, list[Node]] = {}
        for node in program.nodes:
            for ref in dict.fromkeys(node.operands()):
                self._users.setdefault(ref.name, []).append(node)
        parameters = {each.value: name for name, each in program.parameters.items()}
        buffers = {each.value: name for name, each in program.buffers.items()}
        self._names = parameters | buffers
        self._weighed = set(self._names)  # what has to do with parameters: nothing else is worth dividing
        self._in_place = in_place = {program.buffers[name].value for name in program.in_place}
        fixed = {*buffers, *(each.value for each in program.inputs), *program.constants}
        # Of variables and nodes that stand for themselves: what an option stands for -> its unknown.
        self._unknown_for: dict[str, dict[Any, int]] = {}
        self._known_ways: dict[Hashable, list[Strategy]] = {}
        # node that stands for itself, and ways -> each with its unknown
        self._rows: dict[tuple[str, int], list[tuple[Strategy, int]]] = {}
        # the same with operands, whose wishes are noted
        self._asked: set[tuple[str, int, tuple[str, ...]]] = set()
        # What others stand for comes before these, whatever blocks are called and in whichever order they are
        # used.
        variables = dict.fromkeys([*parameters, *sorted(fixed)])
        self.options: dict[str, list[tuple[Placement, int]]] = {value: [] for value in variables}
        for value in sorted(variables, key=self._stands_for_another):
            self.options[value] = self._variable(value, free=value in parameters or value in in_place)
        for node in program.nodes:
            self._weigh(node)
        self.strategies: dict[str, list[tuple[Strategy, int]]] = {node.name: [] for node in program.nodes}
        for node in sorted(program.nodes, key=lambda node: self._stands_for_another(node.name)):
            self.strategies[node.name] = self._node(node)
        outputs = [out.name for out in program.outputs if hasattr(out, "name")] + [
            ref.name for ref in program.updates.values()
        ]
        for name in outputs:
            self._wanted.setdefault((repeats.value(name), INVARIANT), {})[""] = {}
        if self.costs is None:
            return
        self._row_of = {unknown: number for number, row in enumerate(self.choices) for unknown in row}
        targets: dict[str, list[Placement]] = {}
        for value, placement in self._wanted:
            targets.setdefault(value, []).append(placement)
        kept = self._kept()
        for value, placements in targets.items():
            self._change(
                value, placements, kept.get(value, {}), stays=value in in_place or value in parameters
            )

    def _stands_for_another(self, value: str) -> bool:
        return self.repeats.value(value) != value

    def _weigh(self, node: Node) -> None:
        if any(output.requires_grad for output in node.outputs) or any(
            ref.name in self._weighed for ref in node.operands()
        ):
            self._weighed.add(node.name)

    def _one_of(self, costs: Sequence[float]) -> list[int]:
        """New unknowns of which one is taken."""
        unknowns = list(range(len(self.cost), len(self.cost) + len(costs)))
        self.cost += costs
        self.choices.append(unknowns)
        return unknowns

    def _variable(self, value: str, *, free: bool) -> list[tuple[Placement, int]]:
        axes, meta = self.layout.values[value][0], self.layout.metas[value][0]
        fixed = self.held.get(self._names[value]) if self.held is not None and value in self._names else None
        options: list[Placement] = [INVARIANT]
        if free or (fixed is not None and not fixed[0].is_whole):
            options += [REPLICATED] if meta.requires_grad else []
            options += [
                Part(cut) for cut in cuts_of(axes, self.numbers, self.cuts) if covers(axes, cut, self.numbers)
            ]
        if fixed is not None:
            options = [
                each
                for each in options
                if pieces_of(axes, cut_of(each), self.numbers, self.num_ranks) == fixed[0]
                and (not meta.requires_grad or (each == INVARIANT) == fixed[1])
            ]
            if not options:
                raise PlanError(
                    f"This batch's program cannot be divided as the first one was: {self._names[value]} is held otherwise. Keep shapes, or use tp=1."
                )
        elif free:
            options = self.pins.allowed(value, options)
        sizes = [self._largest(value, each) for each in options]
        costs = [self._holding(value, each, size) for each, size in zip(options, sizes, strict=True)]
        counterpart = self.repeats.value(value)
        if counterpart != value:
            found = self._as_for(
                counterpart,
                [(each, self._stand(each), cost) for each, cost in zip(options, costs, strict=True)],
            )
        else:
            found = list(zip(options, self._one_of(costs), strict=True))
            self._unknown_for[value] = {self._stand(each): unknown for each, unknown in found}
            self._made[value] = {self._stand(placement): [unknown] for placement, unknown in found}
        if value in self._names:
            for (_, unknown), size in zip(found, sizes, strict=True):
                self._holds(unknown, size * (HELD_COPIES if meta.requires_grad else 1))
        return found

    def _node(self, node: Node) -> list[tuple[Strategy, int]]:
        seconds = self.rates.node_seconds(self.costs[node.name]) if self.costs else 0.0
        ways = self._ways_of(node)
        owner = self.repeats.value(node.name)
        costs = [seconds * each.work + self._talking(node, each) for each in ways]
        found = self._rows.get((owner, id(ways)))
        if found is not None:
            for (_, unknown), cost in zip(found, costs, strict=True):
                self.cost[unknown] += cost
        elif owner != node.name:
            found = self._as_for(
                owner, [(each, self._counterpart(each), cost) for each, cost in zip(ways, costs, strict=True)]
            )
        else:
            found = list(zip(ways, self._one_of(costs), strict=True))
            self._unknown_for[node.name] = {self._counterpart(each): unknown for each, unknown in found}
            self._made[node.name] = {}
            for strategy, unknown in found:
                self._made[node.name].setdefault(self._stand(strategy.output), []).append(unknown)
        self._rows[owner, id(ways)] = found
        operands = tuple(self.repeats.value(ref.name) for ref in node.operands())
        if (owner, id(ways), operands) not in self._asked:
            self._asked.add((owner, id(ways), operands))
            for strategy, unknown in found:
                for value, placement in zip(operands, strategy.operands, strict=True):
                    self._wanted.setdefault((value, self._stand(placement)), {}).setdefault(owner, {})[
                        unknown
                    ] = None
        if node.name in self._kept_inside:
            for strategy, unknown in found:
                self._holds(unknown, self._kept_inside[node.name] * (strategy.work if strategy.cut else 1.0))
        return found

    def _ways_of(self, node: Node) -> list[Strategy]:
        """Every way to compute a node that is worth looking at; one object for nodes that are the same but
        for values, as in the iterations of a loop."""
        key = facts_of_ways(node, self.layout, self.numbers, weighed=node.name in self._weighed)
        ways = self._known_ways.get(key) if key is not None else None
        if ways is None:
            weighed = node.name in self._weighed
            ways = [
                each
                for each in strategies_of(node, self.layout, self.numbers, self.cuts)
                if weighed or each.output is INVARIANT
            ]
            self._known_ways[key if key is not None else node.name] = ways
        return ways

    def _talking(self, node: Node, strategy: Strategy) -> float:
        """Seconds of what a node sends by itself."""
        item = node.outputs[0].dtype.itemsize if node.outputs else 0
        return sum(talk_seconds(talk, item, self.num_ranks, self.rates) for talk in strategy.talks)

    def _change(
        self,
        value: str,
        targets: Sequence[Placement],
        kept: Mapping[tuple[Placement, Placement], float],
        *,
        stays: bool,
    ) -> None:
        """`value` is changed from what it is made in to what others want. kept: (from, to) -> bytes that are
        kept then."""
        many = value in self.layout.lists
        sources = {
            unknown: placement for placement, unknowns in self._made[value].items() for unknown in unknowns
        }
        made_in = [sources[unknown] for unknown in sorted(sources)]
        own = {placement: self._own(value, placement) for placement in (*self._made[value], *targets)}
        seconds: dict[Placement, list[float]] = {}
        for source in self._made[value]:
            # Parameters are not sent around, and what is updated in place is not copied.
            barred = (
                many
                or value in self._in_place
                or (stays and isinstance(source, Part) and source.cut is not None)
            )
            row = [
                0.0
                if source == target
                else None
                if barred
                else self._seconds(value, own[source], own[target])
                for target in targets
            ]
            seconds[source] = [np.inf if cost is None else cost * self._count[value] for cost in row]
        wants: dict[int, Any] = {}
        for place, target in enumerate(targets):
            for unknowns in self._wanted[value, target].values():
                for unknown in unknowns:
                    row = self._row_of[unknown]
                    wants.setdefault(row, np.zeros((len(self.choices[row]), len(targets)), dtype=bool))[
                        unknown - self.choices[row][0], place
                    ] = True
        always = np.array(
            [any(not unknowns for unknowns in self._wanted[value, target].values()) for target in targets]
        )
        costs = np.array([seconds[source] for source in made_in])
        self.changes.append(
            Change(source=self._row_of[min(sources)], costs=costs, wants=wants, always=always)
        )
        self.change_bytes.append(
            np.array([[kept.get((source, target), 0.0) for target in targets] for source in made_in])
        )

    def _seconds(self, value: str, source: Placement, target: Placement) -> float | None:
        axes, meta = self.layout.values[value][0], self.layout.metas[value][0]
        taken, placed = route_of(axes, target, self.numbers), route_of(axes, source, self.numbers)
        if taken is not None and placed is not None:
            return None
        # through all of the value, or a part of a sum, as `partition.py` does it
        if taken is not None or placed is not None:
            source, target = (source, REPLICATED) if taken is not None else (PARTIAL, target)
            changed = 0.0 if source == target else self._seconds(value, source, target)
            return (
                None
                if changed is None
                else changed
                + (2.0 if meta.requires_grad else 1.0) * meta.num_bytes / self.rates.bytes_per_second
            )
        gathered = target == REPLICATED and self._feeds_linears(value)
        before, after, behind = (
            self._pieces(value, source),
            self._pieces(value, target),
            self._weights_seconds(value) if gathered else 0.0,
        )
        key = (
            id(before),
            id(after),
            kind_of(source),
            kind_of(target),
            meta.dtype,
            meta.num_bytes,
            meta.requires_grad,
            gathered,
            behind,
        )
        if key not in self._seconds_of:
            self._seconds_of[key] = change_seconds(
                meta, source, target, before, after, self.rates, regathered=gathered, behind_seconds=behind
            )  # fmt: skip
        return self._seconds_of[key]

    def _weights_seconds(self, value: str) -> float:
        """Seconds of the weights' gradients of the linear layers that use a value, divided over the ranks:
        its own gradient is summed meanwhile."""
        costs = self.costs or {}
        return (
            sum(costs[node.name].flops for node in self._users[value])
            / self.num_ranks
            / self.rates.flops_per_second
        )

    def _feeds_linears(self, value: str) -> bool:
        """Whether all that use a value are linear layers, which gather it again in the backward and do not
        keep it."""
        users = self._users.get(value, [])
        return bool(users) and all(
            node.operator == "linear" and not node.context.autocast and next(node.operands()).name == value
            for node in users
        )

    def _kept(self) -> dict[str, dict[tuple[Placement, Placement], float]]:
        """Value -> (from, to) -> bytes that autograd keeps of it, in the placement in which those who keep it
        want it."""
        found: dict[str, dict[tuple[Placement, Placement], float]] = {}
        for value, (size, keepers) in self._kept_at.items():
            stood = self.repeats.value(value)
            sums = found.setdefault(stood, {})
            regathered = self._feeds_linears(value)
            whole = max(self._largest(stood, INVARIANT), 1)
            for placement in dict.fromkeys(
                self._stand(placement) for node in keepers for placement in self._ways(node, value)
            ):
                regathers = regathered and placement == REPLICATED
                share = self._largest(stood, self._own(stood, placement)) / whole
                for source in self._made[stood]:
                    kept = size * (
                        self._largest(stood, self._own(stood, source)) / whole if regathers else share
                    )
                    sums[source, placement] = sums.get((source, placement), 0.0) + kept
        return found

    def _ways(self, node: Node, value: str) -> list[Placement]:
        """The placements in which a node may want an operand."""
        return [
            placement
            for strategy, _ in self.strategies[node.name]
            for ref, placement in zip(node.operands(), strategy.operands, strict=True)
            if ref.name == value
        ]

    def _as_for(self, owner: str, options: Sequence[tuple[Any, Any, float]]) -> list[tuple[Any, int]]:
        """Options (own, what it stands for, cost) with the unknowns of those that the owner has for what they
        stand for."""
        known = self._unknown_for.get(owner, {})
        if len(known) != len(options) or any(counterpart not in known for _, counterpart, _ in options):
            raise UnlikeBlocksError
        for _, counterpart, cost in options:
            self.cost[known[counterpart]] += cost
        return [(own, known[counterpart]) for own, counterpart, _ in options]

    def _stand(self, placement: Placement) -> Placement:
        return (
            Part(self._stands[placement.cut])
            if isinstance(placement, Part) and placement.cut is not None
            else placement
        )

    def _own(self, value: str, placement: Placement) -> Placement:
        """The placement of this value that stands for `placement`."""
        if not isinstance(placement, Part) or placement.cut is None:
            return placement
        there = frozenset[int]().union(
            *(self.numbers.leaves(axis) for axes in self.layout.values[value] for axis in axes)
        )
        return next(
            (Part(cut) for cut in self._stood_for[self._stands[placement.cut]] if there & cut.parts.keys()),
            placement,
        )

    def _counterpart(self, strategy: Strategy) -> Hashable:
        """What a strategy stands for: equal for those of nodes that are alike."""
        cut = self._stands[strategy.cut] if strategy.cut is not None else None
        return (
            tuple(map(self._stand, strategy.operands)),
            self._stand(strategy.output),
            strategy.work,
            cut,
            strategy.talks,
        )

    def _pieces(self, value: str, placement: Placement) -> Pieces:
        """Who holds what of a value."""
        key = value, placement
        if key not in self._pieces_of:
            self._pieces_of[key] = self._sections.pieces(self.layout.values[value][0], cut_of(placement))
        return self._pieces_of[key]

    def _largest(self, value: str, placement: Placement) -> float:
        """Bytes of a value on the rank that holds most of it."""
        key = value, placement
        if key not in self._largest_of:
            pieces = self._pieces(value, placement)
            most = max(pieces.num_elements(rank) for rank in range(self.num_ranks))
            self._largest_of[key] = most * self.layout.metas[value][0].dtype.itemsize
        return self._largest_of[key]

    def _holding(self, value: str, placement: Placement, size: float) -> float:
        """Seconds that holding a parameter so is worth: its part is updated and takes memory; partial
        gradients are summed, once a step."""
        meta, rates = self.layout.metas[value][0], self.rates
        if not meta.requires_grad:
            return 0.0
        is_shared = placement != INVARIANT and self._pieces(value, placement).is_shared
        return holding_seconds(size, self.num_ranks, rates, is_shared=is_shared)

    def _holds(self, unknown: int, num_bytes: float) -> None:
        self._memory[unknown] = self._memory.get(unknown, 0.0) + num_bytes

"""The choice of a division as the solvers take it: decisions with a cost per option, and reshards between
them.

A decision is the placement of a graph input, or the strategy of a node. Repeated blocks share decisions,
which then cost as often as the blocks occur.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from meshloom.program.ir.nodes import Node
from meshloom.tensor_parallel.layout.placement import INVARIANT, REPLICATED, Part, Placement
from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.costs import HELD_COPIES, DivisionCosts
from meshloom.tensor_parallel.search.options import Options
from meshloom.tensor_parallel.search.repeats import Representatives, UnlikeBlocksError
from meshloom.tensor_parallel.search.reshards import Reshard
from meshloom.tensor_parallel.search.strategies import Strategy

Told = Callable[[int, int], None]


class Decisions:
    """Decisions, each of which takes one of its options. Options are numbered across all decisions.

    options: the numbers of each decision's options. seconds, num_bytes: of every option, if it is taken.
    """

    def __init__(self) -> None:
        self.options: list[list[int]] = []
        self.seconds: list[float] = []
        self.num_bytes: list[float] = []
        self._known: dict[str, dict[Hashable, int]] = {}  # owner -> what an option represents -> its number

    def add(self, owner: str, represented: Sequence[Hashable], seconds: Sequence[float]) -> list[int]:
        """A new decision of `owner`; returns the numbers of its options."""
        numbers = list(range(len(self.seconds), len(self.seconds) + len(seconds)))
        self.options.append(numbers)
        self.seconds += seconds
        self.num_bytes += [0.0] * len(seconds)
        self._known[owner] = dict(zip(represented, numbers, strict=True))
        return numbers

    def share(self, owner: str, represented: Sequence[Hashable], seconds: Sequence[float]) -> list[int]:
        """The owner's options that represent these, which cost `seconds` more. Raises `UnlikeBlocksError`."""
        known = self._known.get(owner, {})
        if len(known) != len(represented) or any(each not in known for each in represented):
            raise UnlikeBlocksError
        numbers = [known[each] for each in represented]
        self.add_seconds(numbers, seconds)
        return numbers

    def add_seconds(self, numbers: Sequence[int], seconds: Sequence[float]) -> None:
        """Let options cost more."""
        for number, cost in zip(numbers, seconds, strict=True):
            self.seconds[number] += cost


class Formulation:
    """The decisions and reshards of a program.

    placements, strategies: of each graph input and node, its options with their numbers.
    reshards: between decisions. reshard_bytes: [options of the source, targets] of each, the bytes saved. told: called with
    the number of nodes whose options are known, and that of all. sends_parameters: as of `Problem`.
    Raises `UnlikeBlocksError` if blocks that represent each other have other options.
    """

    def __init__(
        self, options: Options, costs: DivisionCosts, representatives: Representatives, told: Told, *,
        sends_parameters: bool = False,
    ) -> None:  # fmt: skip
        self.decisions = Decisions()
        self.reshards, self.reshard_bytes = list[Reshard](), list[Floats]()
        self._options, self._costs, self._representatives = options, costs, representatives
        self._kept = {} if sends_parameters else options.parameters
        self._layout = layout = options.layout
        # value -> placement in which it is produced -> options
        self._produced: dict[str, dict[Placement, list[int]]] = {}
        # (value, placement) -> node that wants it -> options that do
        self._wanted: dict[tuple[str, Placement], dict[str, dict[int, None]]] = {}
        # owner, id of its list of strategies -> numbers
        self._numbers: dict[tuple[str, int], list[int]] = {}
        self._noted: set[tuple[str, int, tuple[str, ...]]] = set()  # the same with operands: wishes are noted

        # Representatives come first, whatever blocks are called and in whichever order they are used.
        representative = representatives.value
        self.placements: dict[str, list[tuple[Placement, int]]] = {value: [] for value in options.inputs}
        for value in sorted(options.inputs, key=lambda value: representative(value) != value):
            self.placements[value] = self._input(value)
        nodes = layout.program.nodes
        self.strategies: dict[str, list[tuple[Strategy, int]]] = {node.name: [] for node in nodes}
        ordered = sorted(nodes, key=lambda node: representative(node.name) != node.name)
        for done, node in enumerate(ordered, start=1):
            self.strategies[node.name] = self._node(node)
            told(done, len(nodes))

        program = layout.program
        outputs = [out.name for out in program.outputs if hasattr(out, "name")]
        for name in (*outputs, *(ref.name for ref in program.updates.values())):
            self._wanted.setdefault((representative(name), INVARIANT), {})[""] = {}
        if costs.costs is not None:
            self._add_reshards()

    def _input(self, value: str) -> list[tuple[Placement, int]]:
        placements = self._options.placements(value)
        seconds = [self._costs.holding_seconds(value, each) for each in placements]
        represented = [self._representatives.placement(each) for each in placements]
        owner = self._representatives.value(value)
        if owner != value:
            numbers = self.decisions.share(owner, represented, seconds)
        else:
            numbers = self.decisions.add(owner, represented, seconds)
            self._produced[value] = {
                each: [number] for each, number in zip(represented, numbers, strict=True)
            }
        if value in self._options.names:
            copies = HELD_COPIES if self._layout.metas[value][0].requires_grad else 1
            for placement, number in zip(placements, numbers, strict=True):
                self.decisions.num_bytes[number] += self._costs.largest_bytes(value, placement) * copies
        return list(zip(placements, numbers, strict=True))

    def _node(self, node: Node) -> list[tuple[Strategy, int]]:
        strategies = self._options.strategies(node)
        owner = self._representatives.value(node.name)
        seconds = [self._costs.computing_seconds(node, each) for each in strategies]
        numbers = self._numbers.get((owner, id(strategies)))
        if numbers is not None:
            self.decisions.add_seconds(numbers, seconds)
        else:
            represented = [self._representatives.strategy(each) for each in strategies]
            if owner != node.name:
                numbers = self.decisions.share(owner, represented, seconds)
            else:
                numbers = self.decisions.add(owner, represented, seconds)
                produced = self._produced[node.name] = {}
                for strategy, number in zip(strategies, numbers, strict=True):
                    placement = self._representatives.placement(strategy.output)
                    produced.setdefault(placement, []).append(number)
        self._numbers[owner, id(strategies)] = numbers
        found = list(zip(strategies, numbers, strict=True))
        operands = tuple(self._representatives.value(ref.name) for ref in node.operands())
        if (owner, id(strategies), operands) not in self._noted:
            self._noted.add((owner, id(strategies), operands))
            for strategy, number in found:
                for value, placement in zip(operands, strategy.operands, strict=True):
                    key = value, self._representatives.placement(placement)
                    self._wanted.setdefault(key, {}).setdefault(owner, {})[number] = None
        saved = self._costs.saved_within.get(node.name)
        if saved is not None:
            for strategy, number in found:
                self.decisions.num_bytes[number] += saved * (strategy.work if strategy.cut else 1.0)
        return found

    def _add_reshards(self) -> None:
        decision_of = {
            number: place for place, numbers in enumerate(self.decisions.options) for number in numbers
        }
        targets: dict[str, list[Placement]] = {}
        for value, placement in self._wanted:
            targets.setdefault(value, []).append(placement)
        count = Counter(self._representatives.value(value) for value in self._layout.values)
        saved = self._saved_bytes()
        for value, placements in targets.items():
            produced = {
                number: placement
                for placement, numbers in self._produced[value].items()
                for number in numbers
            }
            sources = [produced[number] for number in sorted(produced)]
            seconds = self._seconds(value, placements, count[value])
            self.reshards.append(
                Reshard(
                    source=decision_of[min(produced)],
                    costs=np.array([seconds[source] for source in sources]),
                    wants=self._wants(value, placements, decision_of),
                    always=np.array([any(not each for each in self._wanted[value, target].values()) for target in placements]),
                )
            )  # fmt: skip
            kept = saved.get(value, {})
            self.reshard_bytes.append(
                np.array([[kept.get((source, target), 0.0) for target in placements] for source in sources])
            )

    def _seconds(self, value: str, targets: Sequence[Placement], count: int) -> dict[Placement, list[float]]:
        """Placement in which a value is produced -> seconds of resharding it `count` times to each target;
        inf: impossible."""
        produced = self._produced[value]
        own = {
            placement: self._representatives.placement_in(value, placement)
            for placement in (*produced, *targets)
        }
        in_place = value in self._options.in_place
        found: dict[Placement, list[float]] = {}
        for source in produced:
            # Parameters are not sent unless they must be, and what is updated in place is not copied.
            is_barred = (
                in_place
                or value in self._layout.lists
                or (value in self._kept and isinstance(source, Part) and source.cut is not None)
            )
            row = [
                0.0
                if source == target
                else None
                if is_barred
                else self._costs.resharding_seconds(value, own[source], own[target])
                for target in targets
            ]
            found[source] = [np.inf if cost is None else cost * count for cost in row]
        return found

    def _wants(
        self, value: str, targets: Sequence[Placement], decision_of: Mapping[int, int]
    ) -> dict[int, Any]:
        """Decision -> [its options, targets]: which of them want the value in which placement."""
        found: dict[int, Any] = {}
        for place, target in enumerate(targets):
            for numbers in self._wanted[value, target].values():
                for number in numbers:
                    decision = decision_of[number]
                    options = self.decisions.options[decision]
                    if decision not in found:
                        found[decision] = np.zeros((len(options), len(targets)), dtype=bool)
                    found[decision][number - options[0], place] = True
        return found

    def _saved_bytes(self) -> dict[str, dict[tuple[Placement, Placement], float]]:
        """Value -> (produced in, wanted in) -> bytes that autograd saves of it, as the nodes that save it
        want it."""
        found: dict[str, dict[tuple[Placement, Placement], float]] = {}
        for value, (size, savers) in self._costs.saved_operands.items():
            owner = self._representatives.value(value)
            sums = found.setdefault(owner, {})
            is_regathered = self._costs.is_regathered(value)
            for target in dict.fromkeys(
                self._representatives.placement(placement)
                for node in savers
                for placement in self._placements_of_operand(node, value)
            ):
                regathers = is_regathered and target == REPLICATED
                share = self._share(owner, target)
                for source in self._produced[owner]:
                    kept = size * (self._share(owner, source) if regathers else share)
                    sums[source, target] = sums.get((source, target), 0.0) + kept
        return found

    def _share(self, value: str, placement: Placement) -> float:
        """The fraction of a value on the rank that holds the most of it."""
        placement = self._representatives.placement_in(value, placement)
        full = max(self._costs.largest_bytes(value, INVARIANT), 1)
        return self._costs.largest_bytes(value, placement) / full

    def _placements_of_operand(self, node: Node, value: str) -> list[Placement]:
        """The placements in which a node's strategies want an operand."""
        return [
            placement
            for strategy, _ in self.strategies[node.name]
            for ref, placement in zip(node.operands(), strategy.operands, strict=True)
            if ref.name == value
        ]

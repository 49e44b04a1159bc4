"""Chooses how every node of a program is computed by the ranks of one axis: the least seconds of computing and talking.

An integer program: one strategy per node and one placement per parameter; where a node wants an operand in another placement than it
is made in, the change is paid, once for all nodes that want it so. Solved exactly by HiGHS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from meshloom.errors import PlanError
from meshloom.graph.cuts import Numbers, candidates, covers, numbers_of, pieces_of
from meshloom.graph.layout import Layout
from meshloom.graph.nodes import Node
from meshloom.graph.pieces import Pieces
from meshloom.graph.placement import INVARIANT, PARTIAL, REPLICATED, Cut, Part, Placement
from meshloom.graph.repeats import Repeats, repeats_of
from meshloom.graph.strategies import Strategy, strategies_of


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a rank does per second: operations of matrix products, bytes of everything else; and what a collective takes."""

    flops_per_second: float = 5e10
    bytes_per_second: float = 1e10
    latency_seconds: float = 1e-4
    link_bytes_per_second: float = 1e9
    memory_price: float = 5.0  # what holding a byte of parameters, gradients and optimizer state is worth, in bytes sent per step


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a program is divided. strategies: node -> its own. variables: value of a parameter, buffer, input or constant -> placement."""

    num_ranks: int
    layout: Layout
    numbers: Numbers
    strategies: Mapping[str, Strategy]
    variables: Mapping[str, Placement]
    seconds: float
    chosen: tuple[int, ...]  # which of its options each variable and node has, in order

    def placement(self, value: str) -> Placement:
        """Of a value where it is made."""
        return self.variables[value] if value in self.variables else self.strategies[value].output

    def pieces(self, value: str, placement: Placement) -> Pieces:
        """Who holds what of a value (of its only tensor)."""
        cut = placement.cut if isinstance(placement, Part) else None
        return pieces_of(self.layout.values[value][0], cut, self.numbers, self.num_ranks)


Held = Mapping[str, tuple[Pieces, bool]]  # parameter or buffer -> who holds what, and whether its gradient is whole on every rank


def choose(layout: Layout, num_ranks: int, rates: Rates | None = None, *, held: Held | None = None) -> Choice:
    """The cheapest way for `num_ranks` ranks to compute a program's loss.

    held: who holds what of parameters and buffers, if that is decided. Raises `PlanError` if that leaves no way.
    """
    return _Problem(layout, num_ranks, rates or Rates(), held).solve()


def numbers_of_choice(choice: Choice) -> list[int]:
    """A choice as numbers, to be told to other ranks."""
    return list(choice.chosen)


def choice_of_numbers(layout: Layout, num_ranks: int, numbers: Sequence[int], *, held: Held | None = None) -> Choice:
    """The choice that another rank made for the same program."""
    return _Problem(layout, num_ranks, Rates(), held).take(numbers)


class _UnlikeError(Exception):
    """Blocks that are alike have unlike options."""


def _counterparts(cuts: Mapping[int, list[Cut]], repeats: Repeats) -> dict[Cut, Cut]:
    """Every cut -> the one that it stands for."""
    known = {frozenset(cut.parts.items()): cut for each in cuts.values() for cut in each}
    found: dict[Cut, Cut] = {}
    for cut in known.values():
        counterpart = known.get(frozenset((repeats.axis(number), intervals) for number, intervals in cut.parts.items()))
        if counterpart is None or len(counterpart.parts) != len(cut.parts):
            raise _UnlikeError
        found[cut] = counterpart
    return found


@dataclass
class _Problem:
    layout: Layout
    num_ranks: int
    rates: Rates
    held: Held | None = None
    cost: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    rows: list[tuple[list[int], list[float], float, float]] = field(default_factory=list)

    def solve(self) -> Choice:
        """The cheapest choice."""
        self._state()
        found, seconds = self._minimise()
        rows = (*self.options.values(), *self.strategies.values())
        return self._choice([next(place for place, (_, unknown) in enumerate(row) if found[unknown] > 0.5) for row in rows], seconds)

    def take(self, numbers: Sequence[int]) -> Choice:
        """The choice of these options."""
        self._state()
        return self._choice(numbers, 0.0)

    def _choice(self, numbers: Sequence[int], seconds: float) -> Choice:
        split = len(self.options)
        return Choice(
            num_ranks=self.num_ranks,
            layout=self.layout,
            numbers=self.numbers,
            strategies={name: row[at][0] for (name, row), at in zip(self.strategies.items(), numbers[split:], strict=True)},
            variables={value: row[at][0] for (value, row), at in zip(self.options.items(), numbers[:split], strict=True)},
            seconds=seconds,
            chosen=tuple(numbers),
        )

    def _state(self) -> None:
        """Unknowns, and what holds between them. Blocks that are alike share theirs."""
        numbers = self.numbers = numbers_of(self.layout)
        cuts: dict[int, list[Cut]] = {}
        for cut in candidates(self.layout, numbers, self.num_ranks):
            for number in cut.parts:
                cuts.setdefault(number, []).append(cut)
        try:
            self._state_with(cuts, repeats_of(self.layout, numbers))
        except _UnlikeError:  # alike, but what is decided of them is not
            self.cost, self.integral, self.rows = [], [], []
            self._state_with(cuts, Repeats())

    def _state_with(self, cuts: dict[int, list[Cut]], repeats: Repeats) -> None:
        program = self.layout.program
        self.repeats = repeats
        self.stands = _counterparts(cuts, repeats)
        self.count = Counter(repeats.value(value) for value in self.layout.values)
        self.made: dict[str, dict[Placement, list[int]]] = {}  # value -> placement it is made in -> unknowns
        self.wanted: dict[tuple[str, Placement], list[int]] = {}
        parameters = {each.value for each in program.parameters.values()}
        self.weighed = {*parameters, *(each.value for each in program.buffers.values())}
        fixed = {each.value for each in program.buffers.values()} | {each.value for each in program.inputs} | set(program.constants)
        in_place = {program.buffers[name].value for name in program.in_place}
        self.options: dict[str, list[tuple[Placement, int]]] = {}
        for value in [*dict.fromkeys([*(each.value for each in program.parameters.values()), *sorted(fixed)])]:
            self.options[value] = self._variable(value, cuts, free=value in parameters or value in in_place)
        self.strategies: dict[str, list[tuple[Strategy, int]]] = {}
        for node in program.nodes:
            self.strategies[node.name] = self._node(node, cuts)
        for out in program.outputs:
            if hasattr(out, "name"):
                self.wanted.setdefault((repeats.value(out.name), INVARIANT), []).append(-1)
        for out in program.updates.values():
            self.wanted.setdefault((repeats.value(out.name), INVARIANT), []).append(-1)
        for (value, placement), users in self.wanted.items():
            self._change(value, placement, users, stays=value in in_place or value in parameters)

    def _unknown(self, cost: float, *, integral: bool) -> int:
        self.cost.append(cost)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def _one_of(self, unknowns: Sequence[int]) -> None:
        self.rows.append((list(unknowns), [1.0] * len(unknowns), 1.0, 1.0))

    def _variable(self, value: str, cuts: Mapping[int, list[Cut]], *, free: bool) -> list[tuple[Placement, int]]:
        axes = self.layout.values[value]
        meta = self.layout.metas[value][0]
        size = _bytes(meta)
        pinned = self._pinned(value)
        free = free or (pinned is not None and not pinned[0].is_whole)
        options: list[tuple[Placement, float]] = [(INVARIANT, self._held(size) if meta.requires_grad else 0.0)]
        if free:
            if meta.requires_grad:
                options.append((REPLICATED, options[0][1] + self._all_reduce(size, deferred=True)))
            for cut in dict.fromkeys(cut for axis in axes[0] for number in sorted(self.numbers.leaves(axis)) for cut in cuts.get(number, [])):
                if not covers(axes[0], cut, self.numbers):
                    continue
                pieces = pieces_of(axes[0], cut, self.numbers, self.num_ranks)
                share = max(pieces.num_elements(rank) for rank in range(self.num_ranks)) * meta.dtype.itemsize
                update = self._held(share) if meta.requires_grad else 0.0
                options.append((Part(cut), update + (self._all_reduce(size, deferred=True) if pieces.is_shared and meta.requires_grad else 0.0)))
        if pinned is not None:
            options = [
                (placement, cost)
                for placement, cost in options
                if self._pieces(value, placement) == pinned[0] and (not meta.requires_grad or (placement == INVARIANT) == pinned[1])
            ]
            if not options:
                raise PlanError(f"This batch's program cannot be divided as the first one was: {value} is held otherwise. Keep shapes, or use tp=1.")
        stands_for = self.repeats.value(value)
        if stands_for != value:
            return self._as_for(self.options.get(stands_for), [(placement, self._stands(placement), cost) for placement, cost in options])
        unknowns = [(placement, self._unknown(cost, integral=True)) for placement, cost in options]
        self._one_of([unknown for _, unknown in unknowns])
        self.made[value] = {placement: [unknown] for placement, unknown in unknowns}
        return unknowns

    def _as_for(self, others: list[tuple[Any, int]] | None, options: Sequence[tuple[Any, Any, float]]) -> list[tuple[Any, int]]:
        """Options (own, its counterpart, cost) with the unknowns of the counterparts."""
        known = dict(others or ())
        if len(known) != len(options) or any(counterpart not in known for _, counterpart, _ in options):
            raise _UnlikeError
        for _, counterpart, cost in options:
            self.cost[known[counterpart]] += cost
        return [(own, known[counterpart]) for own, counterpart, _ in options]

    def _stands(self, placement: Placement) -> Placement:
        return Part(self.stands[placement.cut]) if isinstance(placement, Part) and placement.cut is not None else placement

    def _counterpart(self, strategy: Strategy) -> Strategy:
        cut = self.stands[strategy.cut] if strategy.cut is not None else None
        operands = tuple(map(self._stands, strategy.operands))
        return Strategy(operands=operands, output=self._stands(strategy.output), work=strategy.work, cut=cut)

    def _pinned(self, value: str) -> tuple[Pieces, bool] | None:
        """Who holds what of a parameter or buffer, if that is decided."""
        program = self.layout.program
        name = next((name for kind in (program.parameters, program.buffers) for name, each in kind.items() if each.value == value), None)
        return self.held.get(name) if self.held is not None and name is not None else None

    def _pieces(self, value: str, placement: Placement) -> Pieces:
        return pieces_of(self.layout.values[value][0], placement.cut if isinstance(placement, Part) else None, self.numbers, self.num_ranks)

    def _held(self, size: float) -> float:
        """Seconds that a rank's part of a parameter is worth: it is updated, and it takes memory, with gradient and two averages."""
        return 20.0 * size / 4 / self.rates.bytes_per_second + self.rates.memory_price * 4 * size / self.rates.link_bytes_per_second

    def _node(self, node: Node, cuts: Mapping[int, list[Cut]]) -> list[tuple[Strategy, int]]:
        seconds = self._seconds(node)
        operands = [ref.name for ref in node.operands()]
        if any(output.requires_grad for output in node.outputs) or any(name in self.weighed for name in operands):
            self.weighed.add(node.name)
        ways = [each for each in strategies_of(node, self.layout, self.numbers, cuts) if node.name in self.weighed or each.output is INVARIANT]
        if self.repeats.value(node.name) != node.name:
            others = self.strategies.get(self.repeats.value(node.name))
            found = self._as_for(others, [(each, self._counterpart(each), seconds * each.work) for each in ways])
        else:
            found = [(each, self._unknown(seconds * each.work, integral=True)) for each in ways]
            self._one_of([unknown for _, unknown in found])
            made: dict[Placement, list[int]] = {}
            for strategy, unknown in found:
                made.setdefault(strategy.output, []).append(unknown)
            self.made[node.name] = made
        for strategy, unknown in found:
            for ref, placement in zip(node.operands(), strategy.operands, strict=True):
                self.wanted.setdefault((self.repeats.value(ref.name), self._stands(placement)), []).append(unknown)
        return found

    def _change(self, value: str, placement: Placement, users: list[int], *, stays: bool) -> None:
        """Unknowns z: `value` is changed to `placement` from what it is made in. Their sum is 1 if anyone wants it so."""
        made = self.made[value]
        many = len(self.layout.metas[value]) != 1
        changes: list[int] = []
        for source, unknowns in made.items():
            if source == placement:
                change = self._unknown(0.0, integral=False)
            else:
                if (
                    many
                    or (stays and isinstance(source, Part) and source.cut is not None)
                    or (stays and not self.layout.metas[value][0].requires_grad)
                ):
                    continue  # parameters are not sent around, and what is updated in place is not copied
                cost = self._cost(value, source, placement)
                if cost is None:
                    continue
                change = self._unknown(cost * self.count[value], integral=False)
            changes.append(change)
            self.rows.append(([change, *unknowns], [1.0, *[-1.0] * len(unknowns)], -np.inf, 0.0))
        for user in dict.fromkeys(users):
            if user < 0:
                self.rows.append((changes, [1.0] * len(changes), 1.0, np.inf))
            else:
                self.rows.append(([*changes, user], [*[1.0] * len(changes), -1.0], 0.0, np.inf))

    def _cost(self, value: str, source: Placement, target: Placement) -> float | None:
        meta = self.layout.metas[value][0]
        size, graded = _bytes(meta), meta.requires_grad
        axes = self.layout.values[value][0]
        if PARTIAL in (source, target) and not meta.dtype.is_floating_point:
            return None
        touch = 2.0 * size / self.rates.bytes_per_second
        if source == INVARIANT:
            if target == PARTIAL or not graded:
                return 0.1 * touch
            return self._sum_or_gather(axes, target, size)
        if source == PARTIAL:
            if target == INVARIANT:
                return self._all_reduce(size)
            return self._sum_or_gather(axes, target, size) * (2.0 if graded else 1.0)
        if target == PARTIAL:
            return touch
        if source == REPLICATED:
            return 0.1 * touch
        if target in (INVARIANT, REPLICATED):
            return self._gather(size) * (2.0 if graded and target == REPLICATED else 1.0)
        return (self.rates.latency_seconds + size / self.num_ranks / self.rates.link_bytes_per_second) * (2.0 if graded else 1.0)

    def _sum_or_gather(self, axes: Any, target: Placement, size: float) -> float:
        assert isinstance(target, Part)
        return self._all_reduce(size) if pieces_of(axes, target.cut, self.numbers, self.num_ranks).is_shared else self._gather(size)

    def _all_reduce(self, size: float, *, deferred: bool = False) -> float:
        n = self.num_ranks
        return (0.0 if deferred else 2 * self.rates.latency_seconds) + 2 * (n - 1) / n * size / self.rates.link_bytes_per_second

    def _gather(self, size: float) -> float:
        n = self.num_ranks
        return self.rates.latency_seconds * 1.01 + (n - 1) / n * size / self.rates.link_bytes_per_second

    def _seconds(self, node: Node) -> float:
        """Of forward and backward on one device, roughly: what counts is how nodes compare."""
        moved = sum(map(_bytes, node.outputs)) + sum(_bytes(meta) for ref in node.operands() for meta in self.layout.metas[ref.name])
        return (3.0 if any(output.requires_grad for output in node.outputs) else 1.0) * (
            moved / self.rates.bytes_per_second + flops(node, self.layout) / self.rates.flops_per_second
        )

    def _minimise(self) -> tuple[Any, float]:
        data: list[float] = []
        row_of: list[int] = []
        column: list[int] = []
        for number, (unknowns, factors, _, _) in enumerate(self.rows):
            data += factors
            row_of += [number] * len(unknowns)
            column += unknowns
        matrix = coo_matrix((data, (row_of, column)), shape=(len(self.rows), len(self.cost))).tocsr()
        limits = LinearConstraint(matrix, [low for _, _, low, _ in self.rows], [high for _, _, _, high in self.rows])  # type: ignore[arg-type]
        scale = max(self.cost) or 1.0
        result: Any = milp(
            np.array(self.cost) / scale,
            constraints=limits,
            integrality=np.array(self.integral),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-3, "time_limit": 60.0},
        )
        if result.x is None:
            raise PlanError(f"No way was found to divide the program over tp={self.num_ranks}: {result.message}. Use tp=1.")
        return result.x, float(result.fun) * scale


def flops(node: Node, layout: Layout) -> float:
    """Multiply-adds of a node's products, forward, times two; 0 for what is no product."""
    mapped = layout.mapped.get(node.name)
    if mapped is None or (not mapped.factors.sums and "attention" not in str(node.target)):
        return 0.0
    if not any(name in str(node.target) for name in ("linear", "mm", "matmul", "conv", "einsum", "bilinear", "attention")):
        return 0.0
    total = 2.0
    for axis in mapped.labels.values():
        total *= axis.size
    return total


def _bytes(meta: Any) -> float:
    total = float(meta.dtype.itemsize)
    for size in meta.shape:
        total *= size
    return total


def changes_of(choice: Choice) -> Iterable[tuple[str, Placement, Placement]]:
    """Every change of placement that a choice asks for: (value, from, to), each once."""
    seen: dict[tuple[str, Placement], None] = {}
    program = choice.layout.program
    for node in program.nodes:
        for ref, wanted in zip(node.operands(), choice.strategies[node.name].operands, strict=True):
            if wanted != choice.placement(ref.name):
                seen.setdefault((ref.name, wanted))
    return [(value, choice.placement(value), wanted) for value, wanted in seen]

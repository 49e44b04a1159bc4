"""Costs of the options of a division: seconds to hold a parameter, compute a node or reshard a value, and the
bytes that autograd saves for the backward pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from meshloom.comm.pieces import Pieces, whole
from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.nodes import Meta, Node, users_by_value
from meshloom.program.operators.collectives import Kind, elements_of_change, elements_of_gather
from meshloom.tensor_parallel.layout.cuts import StripNumbers, route_of
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
from meshloom.tensor_parallel.search.strategies import Strategy

HELD_COPIES = 4  # of a trained parameter: itself, its gradient, and Adam's two averages


class DivisionCosts:
    """Costs of the options of one program on `num_ranks` ranks.

    costs: of the program's nodes. None: computing costs nothing and nothing is saved.
    """

    def __init__(
        self,
        layout: Layout,
        numbers: StripNumbers,
        cuts: Mapping[int, list[Cut]],
        num_ranks: int,
        *,
        rates: Rates,
        costs: Mapping[str, Cost] | None,
    ) -> None:
        self.costs = costs
        # value -> bytes saved of it, and the nodes that save it; node -> bytes saved of its results
        self.saved_operands = saved_operands(layout, costs) if costs else {}
        self.saved_within = saved_within(layout, costs) if costs else {}
        self._layout = layout
        self._numbers = numbers
        self._num_ranks = num_ranks
        self._rates = rates
        self._sections = Sections(numbers, cuts, num_ranks)
        self._pieces: dict[tuple[str, Placement], Pieces] = {}
        self._largest: dict[tuple[str, Placement], float] = {}
        self._reshards: dict[Hashable, float | None] = {}
        self._users = users_by_value(layout.program.nodes)

    def pieces(self, value: str, placement: Placement) -> Pieces:
        """What each rank holds of a value, in sections."""
        key = value, placement
        if key not in self._pieces:
            self._pieces[key] = self._sections.pieces(self._layout.values[value][0], cut_of(placement))
        return self._pieces[key]

    def largest_bytes(self, value: str, placement: Placement) -> float:
        """Bytes of a value on the rank that holds the most of it."""
        key = value, placement
        if key not in self._largest:
            pieces = self.pieces(value, placement)
            most = max(pieces.num_elements(rank) for rank in range(self._num_ranks))
            self._largest[key] = most * self._layout.metas[value][0].dtype.itemsize
        return self._largest[key]

    def holding_seconds(self, value: str, placement: Placement) -> float:
        """Seconds per step that a parameter's placement costs: the optimizer updates the local shard, its
        memory has a price, and partial gradients are summed."""
        rates = self._rates
        if not self._layout.metas[value][0].requires_grad:
            return 0.0
        size = self.largest_bytes(value, placement)
        # an update reads four tensors of its size and writes three, partly from caches
        seconds = 5 * size / rates.bytes_per_second
        seconds += rates.memory_price * HELD_COPIES * size / rates.link_bytes_per_second
        if placement != INVARIANT and self.pieces(value, placement).is_shared:
            nothing, everything = (
                rates.collective_seconds("all_reduce", num_bytes, self._num_ranks)
                for num_bytes in (0.0, size)
            )
            seconds += everything - nothing  # one flat all-reduce sums all of them
        return seconds

    def computing_seconds(self, node: Node, strategy: Strategy) -> float:
        """Seconds of a node on the busiest rank, with the collectives inside it."""
        seconds = self._rates.node_seconds(self.costs[node.name]) if self.costs else 0.0
        item = node.outputs[0].dtype.itemsize if node.outputs else 0
        sent = 0.0
        for talk in strategy.collectives:
            parts = self._num_ranks if talk.collective == "all_gather" else 1
            num_bytes = -(-talk.num_elements // parts) * item
            sent += talk.times * self._rates.collective_seconds(talk.collective, num_bytes, self._num_ranks)
        return seconds * strategy.work + sent

    def resharding_seconds(self, value: str, source: Placement, target: Placement) -> float | None:
        """Seconds to reshard a value. None: there is no such transition."""
        axes, meta = self._layout.values[value][0], self._layout.metas[value][0]
        to_route, from_route = route_of(axes, target, self._numbers), route_of(axes, source, self._numbers)
        if to_route is not None and from_route is not None:
            return None
        # through the full value, or a partial sum, as `partition.py` does it
        if to_route is not None or from_route is not None:
            source, target = (source, REPLICATED) if to_route is not None else (PARTIAL, target)
            seconds = 0.0 if source == target else self.resharding_seconds(value, source, target)
            if seconds is None:
                return None
            copies = 2.0 if meta.requires_grad else 1.0
            return seconds + copies * meta.num_bytes / self._rates.bytes_per_second
        regathered = target == REPLICATED and self.is_regathered(value)
        before, after = self.pieces(value, source), self.pieces(value, target)
        behind = self._weight_gradient_seconds(value) if regathered else 0.0
        kinds, tensor = (kind_of(source), kind_of(target)), (meta.dtype, meta.num_bytes, meta.requires_grad)
        key = id(before), id(after), kinds, tensor, regathered, behind
        if key not in self._reshards:
            self._reshards[key] = reshard_seconds(
                meta, source, target, before, after, self._rates, regathered=regathered, behind_seconds=behind
            )
        return self._reshards[key]

    def is_regathered(self, value: str) -> bool:
        """Whether only linear layers use a value: they gather it again in the backward instead of saving
        it."""
        users = self._users.get(value, [])
        return bool(users) and all(
            node.operator == "linear" and not node.context.autocast and next(node.operands()).name == value
            for node in users
        )

    def _weight_gradient_seconds(self, value: str) -> float:
        """Seconds of the weight gradients of the linear layers that use a value, sharded over the ranks: the
        value's own gradient is summed meanwhile."""
        flops = sum(self.costs[node.name].flops for node in self._users[value]) if self.costs else 0.0
        return flops / self._num_ranks / self._rates.flops_per_second


def reshard_seconds(
    meta: Meta, source: Placement, target: Placement, before: Pieces, after: Pieces, rates: Rates, *, regathered: bool = False,
    behind_seconds: float = 0.0,
) -> float | None:  # fmt: skip
    """Seconds of resharding a value, forward and backward. None: there is no such transition.

    regathered: shards of the value are gathered again in the backward instead of being saved.
    behind_seconds: of computation that overlaps with each collective of the backward, except with its start.
    """
    if is_same(source, target, before, after):
        return 0.0
    if PARTIAL in (source, target) and not meta.dtype.is_floating_point:
        return None
    try:
        calls = [
            elements_of_change(kind_of(source), kind_of(target), before, after, 0, backward=backward)
            for backward in ((False, True) if meta.requires_grad else (False,))
        ]
        if regathered and meta.requires_grad and isinstance(source, Part) and not before.is_whole:
            calls.append(elements_of_gather(before, whole(before.shape, before.num_ranks), 0))
    except ValueError:  # shards that overlap in more than one dim
        return None
    item, size = meta.dtype.itemsize, meta.num_bytes
    seconds = sum(
        rates.collective_seconds(call[0], call[1] * item, before.num_ranks)
        for call in calls
        if call is not None
    )
    # the sum overlaps with the weight gradients; what is gathered again with the input's, which take as long
    for call in calls[1:]:
        if call is not None:
            started = rates.collective_seconds(call[0], 0.0, before.num_ranks)
            on_its_way = rates.collective_seconds(call[0], call[1] * item, before.num_ranks)
            seconds -= min(behind_seconds, on_its_way - started)
    # What is sent is packed and unpacked; otherwise it is read, or partly copied.
    touched = sum(2.0 if call is not None else 0.1 for call in calls)
    touched += 1.0 if target == PARTIAL and isinstance(source, Part) else 0.0
    return seconds + touched * size / rates.bytes_per_second


def is_same(source: Placement, target: Placement, before: Pieces, after: Pieces) -> bool:
    """Whether two placements of a value are equal: two cuts may differ only in axes that it does not have."""
    return source == target or (isinstance(source, Part) and isinstance(target, Part) and before == after)


def kind_of(placement: Placement) -> Kind:
    """The kind of a placement, as `Transition` has it."""
    return "part" if isinstance(placement, Part) else "partial" if placement == PARTIAL else "invariant"


def saved_operands(layout: Layout, costs: Mapping[str, Cost]) -> dict[str, tuple[int, list[Node]]]:
    """Value -> the bytes that autograd saves of it, and the nodes that save it. Memory saved through several
    views counts once."""
    found: dict[str, tuple[int, list[Node]]] = {}
    through: dict[str, str] = {}  # memory -> the value through which it was first saved
    for node, kept, operand in _saved(layout, costs):
        if operand is not None and through.setdefault(kept.memory, operand) == operand:
            found.setdefault(operand, (kept.num_bytes, []))[1].append(node)
    return found


def saved_within(layout: Layout, costs: Mapping[str, Cost]) -> dict[str, int]:
    """Node -> the bytes that autograd saves of its results and intermediates."""
    found: dict[str, int] = {}
    for node, kept, operand in _saved(layout, costs):
        if operand is None:
            found[node.name] = found.get(node.name, 0) + kept.num_bytes
    return found


def _saved(layout: Layout, costs: Mapping[str, Cost]) -> Iterator[tuple[Node, SavedTensor, str | None]]:
    """All saved tensors: the node that saves it, and the operand that it is (None: no operand). Parameters,
    buffers, inputs and constants are left out, since they exist anyway."""
    program = layout.program
    variables = (*program.parameters.values(), *program.buffers.values())
    given = {*(each.value for each in (*variables, *program.inputs)), *program.constants}
    memory_of: dict[str, str] = {}
    for node in program.nodes:
        operands = [ref.name for ref in node.operands()]
        if operands and not costs[node.name].written_bytes and node.outputs:
            memory_of[node.name] = memory_of.get(operands[0], operands[0])  # a view
        for kept in costs[node.name].kept:
            if kept.memory not in given:
                same = (name for name in operands if memory_of.get(name, name) == kept.memory)
                yield node, kept, next(same, None)

"""Recomputation of activations: segment by segment (full), or where it is cheap (selective).

    none         everything that autograd saves is kept
    full         values at the borders of segments are kept (`segments.py`), and received values
    selective    values that are expensive to compute are kept, too. Operators that take longer to compute than to
                 move their bytes (matrix products, convolutions) are never recomputed, except attention; of
                 the others, those whose recomputation minimizes bytes kept and seconds, weighted
                 (`selective.py`)

Attention is recomputed although it consists of products: keeping it means keeping its result and statistics,
or, if not fused, scores for every pair of positions, which are most of a block's memory and little of its
time (Korthikanti et al., 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshloom.core.errors import PlanError
from meshloom.program.cost.cost import Cost, costs
from meshloom.program.cost.rates import Rates, default_rates
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.recompute.saved_tensors import Save, Source, recomputation_of
from meshloom.program.recompute.segments import Segment, is_view, segments_of
from meshloom.program.recompute.selective import Candidate, cheapest_kept

MOVED_PER_KEPT = 16.0  # bytes moved for recomputing a byte, above which it is kept
_HOW = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """Memory and time of a microbatch under recomputation.

    kept_bytes: of activations from forward to backward, without parameters, buffers, constants and the batch.
    seconds: of recomputing. again_bytes: largest recomputed memory, of one segment at a time.
    kept_of, seconds_of: the same by the node that owns the memory or is recomputed; they add up to the
        totals.
    """

    kept_bytes: int
    seconds: float
    again_bytes: int
    kept_of: Mapping[str, int]
    seconds_of: Mapping[str, float]


def with_recomputation(
    program: Program, how: str, *, costs_of: Mapping[str, Cost] | None = None, rates: Rates | None = None
) -> Program:
    """The program with recomputation. how: none, full or selective.

    May be applied before or after a program is sharded and split into stages, which preserve it. costs_of,
    rates: for the choices of selective; default: the costs of this program (for a sharded program, give those
    of the unsharded one) and its device's default rates.
    """
    if how == "none":
        return replace(program, kept=None)
    return replace(program, kept=kept_values(program, costs_of, how, rates))


def recomputed(
    program: Program, costs_of: Mapping[str, Cost], how: str, rates: Rates | None = None
) -> Recomputed:
    """What `program` keeps and recomputes under `how`. costs_of: node -> its cost (`costs(program)`)."""
    rates = rates or default_rates(program.device.type)
    kept = kept_values(program, costs_of, how, rates) if how != "none" else None
    facts = _Facts(program, costs_of)
    there: set[str] = set()  # memory that is kept
    seconds_of: dict[str, float] = {}
    again_bytes = copied_bytes = 0
    changing = {
        program.buffers[name].value: program.buffers[name].meta.num_bytes for name in program.changing
    }
    for segment in segments_of(program):
        memories = [(node.name, each.memory) for node in segment.nodes for each in costs_of[node.name].kept]
        if kept is None:
            there.update(memory for _, memory in memories)
            continue
        recipe = recomputation_of(segment, facts.saves(memories), facts.borders(segment), kept)
        again = {memory for (_, memory), is_again in zip(memories, recipe.again, strict=True) if is_again}
        there.update(memory for _, memory in memories if memory not in again)
        if again:
            held = (*recipe.held_given, *recipe.held_made)
            there.update(facts.owner_of.get(name, name) for name in held)
            copied_bytes += sum(changing.get(name, 0) for name in held)
        again_bytes = max(again_bytes, sum(facts.num_bytes[memory] for memory in again))
        recomputed_nodes = [node.name for node in recipe.nodes if node.name in costs_of]
        seconds_of |= {name: rates.forward_seconds(costs_of[name]) for name in recomputed_nodes}
    kept_of: dict[str, int] = {}
    for memory in there:
        owner = _owner(memory)
        if owner in facts.owner_of:
            kept_of[owner] = kept_of.get(owner, 0) + facts.num_bytes[memory]
    return Recomputed(
        kept_bytes=sum(kept_of.values()) + copied_bytes,
        seconds=sum(seconds_of.values()),
        again_bytes=again_bytes,
        kept_of=kept_of,
        seconds_of=seconds_of,
    )


def kept_values(
    program: Program, costs_of: Mapping[str, Cost] | None, how: str, rates: Rates | None = None
) -> frozenset[str]:
    """Nodes whose results are kept if backward needs them, and `NODE:` for nodes whose inner tensors are
    kept; besides borders and received values."""
    if how not in _HOW:
        raise PlanError(f"recompute={how} is not known. Known: {', '.join(_HOW)}.")
    if how == "full":
        return frozenset()
    costs_of = costs(program) if costs_of is None else costs_of
    rates = rates or default_rates(program.device.type)
    facts = _Facts(program, costs_of)
    candidates = {
        node.name: facts.candidate(node, _price(node, costs_of.get(node.name), rates))
        for node in program.nodes
    }
    kept = {mark for name, each in candidates.items() if each.price is None for mark in (name, f"{name}:")}
    for segment in segments_of(program):
        kept |= cheapest_kept(segment, candidates, facts.borders(segment))
    return frozenset(kept)


def _price(node: Node, cost: Cost | None, rates: Rates) -> float | None:
    """Bytes that are worth recomputing a node; None: it is not recomputed."""
    if cost is None or is_opaque(node):
        return None
    if "attention" in node.operator:
        return 0.0
    moved = cost.read_bytes + cost.written_bytes
    is_product = cost.flops / rates.flops_per_second > moved / rates.bytes_per_second
    return None if is_product else moved / MOVED_PER_KEPT


class _Facts:
    """Facts about a program's memory from its costs, named as in `SavedTensor`. owner_of: node -> the value
    that owns the memory of its result."""

    def __init__(self, program: Program, costs_of: Mapping[str, Cost]) -> None:
        self.owner_of: dict[str, str] = {}
        for node in program.nodes:
            operands = [ref.name for ref in node.operands()]
            written = node.name in costs_of and costs_of[node.name].written_bytes
            views = is_view(node.target) and operands and not written
            self.owner_of[node.name] = self.owner_of.get(operands[0], operands[0]) if views else node.name
        self._num_results = {node.name: max(len(node.outputs), 1) for node in program.nodes}
        self.num_bytes = {node.name: sum(each.num_bytes for each in node.outputs) for node in program.nodes}
        self._inside: dict[str, int] = {}
        self._saved: set[str] = set()
        saved = {each.memory: each.num_bytes for cost in costs_of.values() for each in cost.kept}
        for memory, num_bytes in saved.items():
            self.num_bytes[memory] = num_bytes
            if self._is_inside(memory):
                self._inside[_owner(memory)] = self._inside.get(_owner(memory), 0) + num_bytes
            else:
                self._saved.add(_owner(memory))

    def candidate(self, node: Node, price: float | None) -> Candidate:
        """The node, with that price."""
        return Candidate(
            price=price,
            result_bytes=sum(each.num_bytes for each in node.outputs),
            inside_bytes=self._inside.get(node.name, 0),
            result_saved=node.name in self._saved,
            views=self.owner_of[node.name] != node.name,
        )

    def borders(self, segment: Segment) -> set[str]:
        """Owners of the memory that later segments read."""
        return {self.owner_of[name] for name in segment.results}

    def saves(self, memories: Sequence[tuple[str, str]]) -> list[Save]:
        """Saves for pairs of a node and a memory that it keeps."""
        first: dict[str, int] = {}
        saves: list[Save] = []
        for number, (node, memory) in enumerate(memories):
            owner, inside = _owner(memory), self._is_inside(memory)
            like = first.setdefault(memory, number) if inside else number
            source = None if inside else Source(value=owner)
            saves.append(Save(node=node, owner=owner, inside=inside, source=source, like=like))
        return saves

    def _is_inside(self, memory: str) -> bool:
        """Whether it is not an operator's result."""
        owner, _, number = memory.partition(":")
        return bool(number) and int(number) >= self._num_results.get(owner, 1)


def _owner(memory: str) -> str:
    """The value, or the node that created it internally."""
    return memory.partition(":")[0]

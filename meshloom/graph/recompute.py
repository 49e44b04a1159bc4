"""Recomputation: what backward needs of forward is kept, or computed again, segment by segment (full) or where that is cheap (selective).

    none         everything that autograd saves is kept
    full         kept is what crosses the borders of segments (`segments.py`), and what ranks sent each other
    selective    kept are also results that are dear to compute: of operators that take longer to compute than to move their bytes
                 (matrix products, convolutions), except attention, and whatever takes longer per byte than that is worth

Attention runs again although it is a product: kept, it would hold its result and its statistics, and written out, scores for every pair of
positions, which are most of a block's memory and little of its time (Korthikanti et al., 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshloom.errors import PlanError
from meshloom.graph.cost import Cost, costs
from meshloom.graph.nodes import Node
from meshloom.graph.program import Program
from meshloom.graph.rates import Rates, default_rates
from meshloom.graph.recipe import Save, Source, make_recipe
from meshloom.graph.segments import Segment, is_view, segments_of

DEAR = 16.0  # times that a result could be written while it is computed
_HOW = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What a microbatch takes under recomputation.

    kept_bytes: of activations, from its forward to its backward; without parameters, buffers, constants and the batch.
    seconds: of computing again. again_bytes: most that is there again at one time, of one segment.
    kept_of, seconds_of: the same by the node that made the memory, or that runs again. They add up to the totals.
    """

    kept_bytes: int
    seconds: float
    again_bytes: int
    kept_of: Mapping[str, int]
    seconds_of: Mapping[str, float]


def with_recomputation(program: Program, how: str, *, costs_of: Mapping[str, Cost] | None = None, rates: Rates | None = None) -> Program:
    """The program, computing the same with less kept. how: none, full or selective.

    It may be done before a program is divided and cut, or after: division and cuts keep it. costs_of, rates: what selective decides by; default:
    the costs of this program (which a program that is divided already does not have: give those of the whole) and its device's default rates.
    """
    if how == "none":
        return replace(program, kept=None, _runners={})
    return replace(program, kept=kept_nodes(program, costs_of, how, rates), _runners={})


def kept_nodes(program: Program, costs_of: Mapping[str, Cost] | None, how: str, rates: Rates | None = None) -> frozenset[str]:
    """The nodes that never run again under `how`, besides those in which ranks talk."""
    if how not in _HOW:
        raise PlanError(f"recompute={how} is not known. Known: {', '.join(_HOW)}.")
    if how == "none":
        return frozenset(node.name for node in program.nodes)
    if how == "full":
        return frozenset()
    costs_of = costs(program) if costs_of is None else costs_of
    rates = rates or default_rates(program.device.type)
    owned: dict[str, dict[str, int]] = {}
    for cost in costs_of.values():
        for each in cost.kept:
            owned.setdefault(_owner(each.memory), {})[each.memory] = each.num_bytes
    return frozenset(
        node.name for node in program.nodes if node.name not in costs_of or _is_dear(node, costs_of[node.name], sum(owned.get(node.name, {}).values()), rates)
    )  # fmt: skip


def recomputed(program: Program, costs_of: Mapping[str, Cost], how: str, rates: Rates | None = None) -> Recomputed:
    """What `program` keeps and what it computes again under `how`. costs_of: node -> its cost (`costs(program)`)."""
    rates = rates or default_rates(program.device.type)
    kept = kept_nodes(program, costs_of, how, rates)
    known = {each.memory: each.num_bytes for cost in costs_of.values() for each in cost.kept}
    owner_of = _owners(program, costs_of)
    sizes = {node.name: sum(each.num_bytes for each in node.outputs) for node in program.nodes}
    there: set[str] = set()  # memory that is kept
    seconds_of: dict[str, float] = {}
    again_bytes = 0
    copies = 0
    changing = {each.value: each.meta.num_bytes for name, each in program.buffers.items() if name in program.updates or name in program.in_place}
    for segment in segments_of(program):
        memories = [(node.name, each.memory) for node in segment.nodes for each in costs_of[node.name].kept]
        if how == "none":
            there |= {memory for _, memory in memories}
            continue
        recipe = make_recipe(segment, _saves(memories), {owner_of[name] for name in segment.results}, kept)
        there |= {memory for (_, memory), again in zip(memories, recipe.again, strict=True) if not again}
        if any(recipe.again):
            there |= {owner_of.get(name, name) for name in (*recipe.held_given, *recipe.held_made)}
            copies += sum(changing.get(name, 0) for name in recipe.held_given)
        again = {memory for (_, memory), again in zip(memories, recipe.again, strict=True) if again}
        again_bytes = max(again_bytes, sum(known[memory] for memory in again))
        seconds_of |= {node.name: rates.forward_seconds(costs_of[node.name]) for node in recipe.nodes if node.name in costs_of}
    kept_of: dict[str, int] = {}
    for memory in there:
        if _owner(memory) in sizes:
            kept_of[_owner(memory)] = kept_of.get(_owner(memory), 0) + known.get(memory, sizes[_owner(memory)])
    return Recomputed(
        kept_bytes=sum(kept_of.values()) + copies,
        seconds=sum(seconds_of.values()),
        again_bytes=again_bytes,
        kept_of=kept_of,
        seconds_of=seconds_of,
    )


def _is_dear(node: Node, cost: Cost, owned_bytes: int, rates: Rates) -> bool:
    if "attention" in node.operator:
        return False
    computing, moving = cost.flops / rates.flops_per_second, (cost.read_bytes + cost.written_bytes) / rates.bytes_per_second
    result = max(owned_bytes, sum(each.num_bytes for each in node.outputs))
    return computing > moving or moving > DEAR * result / rates.bytes_per_second


def _saves(memories: list[tuple[str, str]]) -> list[Save]:
    """Of a segment's nodes and the memory that each of them keeps."""
    first: dict[str, int] = {}
    saves: list[Save] = []
    for number, (node, memory) in enumerate(memories):
        inside = _owner(memory) != memory
        like = first.setdefault(memory, number) if inside else number
        saves.append(Save(node=node, owner=_owner(memory), source=Source(value=_owner(memory)), like=like))
    return saves


def _owner(memory: str) -> str:
    """The value, or the node inside of which it was made."""
    return memory.partition(":")[0]


def _owners(program: Program, costs_of: Mapping[str, Cost]) -> dict[str, str]:
    """Node -> the value in whose memory its result lies."""
    found: dict[str, str] = {}
    for node in program.nodes:
        operands = [ref.name for ref in node.operands()]
        views = is_view(node.target) and operands and not costs_of[node.name].written_bytes
        found[node.name] = found.get(operands[0], operands[0]) if views else node.name
    return found

"""Which parts of a program are opaque, why, and how much of its parameters and FLOPs they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshloom.program.cost.cost import Cost
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.opaque.operator import call_of_node, is_opaque

NAMED = 3


def opaque_notes(program: Program, costs: Mapping[str, Cost]) -> list[str]:
    """One sentence per reason; none for a program without opaque parts."""
    named: dict[tuple[str, bool], list[str]] = {}
    for path, why in program.opaque.items():
        named.setdefault((why, bool(_with_units(program, [path]))), []).append(path)
    return [_note(program, costs, paths, why) for (why, _), paths in named.items()]


def _with_units(program: Program, paths: Sequence[str]) -> list[Node]:
    """The calls of opaque modules whose hidden units can be divided."""
    calls = (node for node in program.nodes if is_opaque(node) and node.args[2] in paths)
    return [node for node in calls if call_of_node(node).units is not None]


def _note(program: Program, costs: Mapping[str, Cost], paths: Sequence[str], why: str) -> str:
    names = ", ".join(path or "the model" for path in paths[:NAMED])
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    parameters, flops = opaque_shares(program, costs, paths)
    several = len(paths) > 1
    divisible = _with_units(program, paths)
    how = "of which tp divides the hidden units" if divisible else "that is not divided"
    note = (
        f"{names}{more} {'run' if several else 'runs'} as written, as one operator {how}: {why.removesuffix('.')}. "
        f"{'They are' if several else 'It is'} {parameters:.1%} of the parameters and {flops:.1%} of the FLOPs"
    )
    if not divisible:
        return f"{note}."
    in_units = _elements_in_units(program, divisible) / (_num_elements(program) or 1)
    work = sum(_work(costs[node.name]) * (1 - _rest(node)) for node in divisible)
    alike = work / (sum(map(_work, costs.values())) or 1)
    return f"{note}, of which {in_units:.1%} and {alike:.1%} belong to hidden units."


def _rest(node: Node) -> float:
    units = call_of_node(node).units
    return 1.0 if units is None else units.rest


def _elements_in_units(program: Program, nodes: Sequence[Node]) -> int:
    """Elements of parameters that have hidden units."""
    found: set[str] = set()
    for node in nodes:
        units = call_of_node(node).units
        state = node.args[1]
        found |= {state[each.number].name for each in (units.dims if units is not None else ())}
    return sum(math.prod(each.meta.shape) for each in program.parameters.values() if each.value in found)


def _num_elements(program: Program) -> int:
    return sum(math.prod(each.meta.shape) for each in program.parameters.values())


def _work(cost: Cost) -> int:
    return cost.flops + cost.backward_flops


def opaque_shares(
    program: Program, costs: Mapping[str, Cost], paths: Sequence[str] | None = None
) -> tuple[float, float]:
    """The share of opaque parts in a program's parameters, and in its FLOPs forward and backward. paths: of which;
    default: of all."""
    nodes = [node for node in program.nodes if is_opaque(node) and (paths is None or node.args[2] in paths)]
    used = {ref.name for node in nodes for ref in node.operands()}
    sizes = {each.value: math.prod(each.meta.shape) for each in program.parameters.values()}
    work = {name: _work(each) for name, each in costs.items()}
    return (
        sum(size for value, size in sizes.items() if value in used) / (sum(sizes.values()) or 1),
        sum(work[node.name] for node in nodes) / (sum(work.values()) or 1),
    )

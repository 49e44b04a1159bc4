"""What autograd keeps of a divided program, as far as a choice can change it: of operands, and inside of
nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.ir.nodes import Node
from meshloom.tensor_parallel.layout.layout import Layout

HELD_COPIES = 4  # of a parameter that is trained: itself, its gradient, and two averages, as Adam keeps


def kept_operands(layout: Layout, costs: Mapping[str, Cost]) -> dict[str, tuple[int, list[Node]]]:
    """Value -> bytes that autograd keeps of it, and the nodes that make it do so. Memory that is kept through
    several views counts once."""
    found: dict[str, tuple[int, list[Node]]] = {}
    through: dict[str, str] = {}  # memory -> the value through which it was first kept
    for node, kept, operand in _kept(layout, costs):
        if operand is not None and through.setdefault(kept.memory, operand) == operand:
            found.setdefault(operand, (kept.num_bytes, []))[1].append(node)
    return found


def kept_within(layout: Layout, costs: Mapping[str, Cost]) -> dict[str, int]:
    """Node -> bytes that autograd keeps of its results and of what is made inside of it."""
    found: dict[str, int] = {}
    for node, kept, operand in _kept(layout, costs):
        if operand is None:
            found[node.name] = found.get(node.name, 0) + kept.num_bytes
    return found


def _kept(layout: Layout, costs: Mapping[str, Cost]) -> Iterator[tuple[Node, SavedTensor, str | None]]:
    """Everything kept: by which node, and through which of its operands (None: through none). Without what is
    there anyway."""
    program = layout.program
    given = {
        each.value for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    } | set(program.constants)
    memory_of: dict[str, str] = {}
    for node in program.nodes:
        operands = [ref.name for ref in node.operands()]
        if operands and not costs[node.name].written_bytes and node.outputs:
            memory_of[node.name] = memory_of.get(operands[0], operands[0])  # a view
        for kept in costs[node.name].kept:
            if kept.memory not in given:
                yield (
                    node,
                    kept,
                    next((name for name in operands if memory_of.get(name, name) == kept.memory), None),
                )

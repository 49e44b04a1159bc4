"""Moves updates of buffers that depend on the model's state alone to where the buffers are first used.

A teacher's moving average is written at the end of a loss, or before anything runs, and read in the middle. Beside
its readers it is computed in their stage of a pipeline:

    teacher.0 (old weight)   teacher.1 ...  student ...  new = mul(old, 0.99); new = add(new, q)     as written
    new = ...  teacher.0 (old weight)       new = ...  teacher.1      student ...                    here
"""

from __future__ import annotations

from dataclasses import replace

from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program


def with_early_updates(program: Program) -> Program:
    """The same program, whose nodes compute the same values."""
    if not program.updates:
        return program
    of_state = _computed_from_state(program)
    by_name = {node.name: node for node in program.nodes}
    values = {each.value: name for name, each in program.buffers.items()}
    chains: dict[str, list[Node]] = {}  # buffer -> the nodes of its new value, in order
    moving: dict[str, str] = {}  # node -> the buffer of its chain
    for name, ref in program.updates.items():
        chain = _chain(ref, by_name, of_state, moving)
        chains[name] = chain
        moving.update((node.name, name) for node in chain)
    first: dict[str, str] = {}  # node -> the buffers whose chains come before it
    readers: dict[str, list[str]] = {}
    for node in program.nodes:
        if node.name in moving:
            continue
        for ref in node.operands():
            buffer = moving.get(ref.name) or values.get(ref.name)
            if buffer in chains and buffer not in first:
                first[buffer] = node.name
                readers.setdefault(node.name, []).append(buffer)
    nodes: list[Node] = []
    for node in program.nodes:
        for buffer in readers.get(node.name, ()):
            nodes += chains[buffer]
        if moving.get(node.name) in first:
            continue
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def _computed_from_state(program: Program) -> set[str]:
    """Nodes that depend on parameters, buffers and constants alone, without draws."""
    variables = (*program.parameters.values(), *program.buffers.values())
    known = {*program.constants, *(each.value for each in variables)}
    found: set[str] = set()
    for node in program.nodes:
        refs = [ref.name for ref in node.operands()]
        if refs and not node.num_draws and all(name in known or name in found for name in refs):
            found.add(node.name)
    return found


def _chain(ref: Ref, by_name: dict[str, Node], of_state: set[str], taken: dict[str, str]) -> list[Node]:
    """The nodes of a new value that no other chain has, in order; none if it depends on more than the state."""
    found: dict[str, Node] = {}
    waiting = [ref.name]
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in found:
            if name not in of_state or name in taken:
                return []
            found[name] = by_name[name]
            waiting += [each.name for each in by_name[name].operands()]
    order = {name: number for number, name in enumerate(by_name)}
    return sorted(found.values(), key=lambda node: order[node.name])

"""Moves updates of buffers to where the buffers are used: those that depend on the model's state alone to their first use,
others behind their last use, or behind what they depend on.

A teacher's moving average is written at the end of a loss, or before anything runs, and read in the middle. Beside
its readers it is computed in their stage of a pipeline:

    teacher.0 (old weight)   teacher.1 ...  student ...  new = mul(old, 0.99); new = add(new, q)     as written
    new = ...  teacher.0 (old weight)       new = ...  teacher.1      student ...                    here

    mean (of the batch)  mixed = mean + running mean ...  layers ...  copy(mixed)                    as traced
    mean (of the batch)  mixed = mean + running mean  copy(mixed) ...  layers ...                    here
"""

from __future__ import annotations

from dataclasses import replace

from meshloom.program.ir.nodes import Node, Ref, refs_in
from meshloom.program.ir.program import Program


def with_early_updates(program: Program) -> Program:
    """The same program, whose nodes compute the same values."""
    return _without_late_ends(_beside_first_uses(program))


def _beside_first_uses(program: Program) -> Program:
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


def _without_late_ends(program: Program) -> Program:
    """Nodes that only a buffer's new value needs follow the last other use of the buffer, or what they depend on."""
    at = {node.name: number for number, node in enumerate(program.nodes)}
    buffers = {each.value: name for name, each in program.buffers.items()}
    readers: dict[str, set[str]] = {}
    for node in program.nodes:
        for ref in node.operands():
            readers.setdefault(ref.name, set()).add(node.name)
    returned = {ref.name for ref in refs_in(program.outputs)}
    behind: dict[str, list[Node]] = {}  # node -> those that are moved behind it
    for name, ref in program.updates.items():
        others = {each.name for other, each in program.updates.items() if other != name}
        own: set[str] = set()
        for node in reversed(program.nodes):
            if node.name in returned | others or not _is_pure(node):
                continue
            if node.name == ref.name or (readers.get(node.name) and readers[node.name] <= own):
                own.add(node.name)
        operands = {each.name for node in own for each in program.nodes[at[node]].operands()} - own
        states = {each for each in operands if buffers.get(each) in program.updates} | {
            program.buffers[name].value
        }
        if name in program.in_place or any(buffers.get(each) in program.in_place for each in operands):
            continue
        before = (operands & at.keys()).union(*(readers.get(each, set()) - own for each in states))
        last = max((at[each] for each in before), default=None)
        if last is not None:
            late = [node for node in program.nodes[last + 1 :] if node.name in own]
            behind.setdefault(program.nodes[last].name, []).extend(late)
    moved = {node.name for nodes in behind.values() for node in nodes}
    nodes: list[Node] = []
    waiting = [node for node in reversed(program.nodes) if node.name not in moved]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += reversed(behind.get(node.name, ()))
    return replace(program, nodes=tuple(nodes))


def _is_pure(node: Node) -> bool:
    """Whether it is an operator of torch that neither draws nor writes."""
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and node.target.namespace == "aten"
        and not schema.is_mutable
        and not node.num_draws
    )

"""Chains of operators that compiled code runs as one: what lies between products reads what comes from outside and writes what is needed outside.

eager       read x, write x + b | read it, write gelu | read it, write its product with a mask, and the mask
compiled    read x and b, write the last result, and what backward needs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshloom.clusters.work import OperatorWork
from meshloom.planner.on_clusters.rank_records import NodeRecord
from meshloom.program.ir.nodes import Node, refs_in
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.layout import metas_of


def fused(program: Program, records: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """The records as compiled code does it, a chain's at its first node."""
    chains = _Chains(program, records)
    found = dict(records)
    for chain in chains:
        there, back = chains.bytes_of(chain)
        names = [node.name for node in chain]
        found |= {name: replace(records[name], forward=(), backward=()) for name in names}
        found[names[0]] = replace(found[names[0]], forward=_call(there, chain), backward=_call(back, chain))
    return found


def _call(num_bytes: int, chain: Sequence[Node]) -> tuple[OperatorWork, ...]:
    dtype = str(chain[-1].outputs[0].dtype).removeprefix("torch.")
    return (OperatorWork(kind="other", flops=0, num_bytes=num_bytes, dtype=dtype),) if num_bytes else ()


class _Chains:
    """Consecutive nodes that neither multiply nor send, of which two or more move bytes."""

    def __init__(self, program: Program, records: Mapping[str, NodeRecord]) -> None:
        self._program, self._records = program, records
        self._metas = metas_of(program)
        self._owner: dict[str, str] = {}
        for node in program.nodes:
            operands = [ref.name for ref in node.operands()]
            is_view = bool(operands) and not records[node.name].forward
            self._owner[node.name] = self._owner.get(operands[0], operands[0]) if is_view else node.name
        self._users: dict[str, set[str]] = {}
        for node in program.nodes:
            for name in {self._owner.get(ref.name, ref.name) for ref in node.operands()}:
                self._users.setdefault(name, set()).add(node.name)
        self._returned = {ref.name for ref in refs_in((program.outputs, tuple(program.updates.values())))}
        self._kept = {each.memory for found in records.values() for each in found.kept}

    def __iter__(self) -> Iterator[list[Node]]:
        chain: list[Node] = []
        for node in self._program.nodes:
            record = self._records[node.name]
            did = (*record.forward, *record.backward)
            if all(isinstance(each, OperatorWork) and each.kind == "other" for each in did) and node.outputs:
                chain.append(node)
                continue
            yield from self._worth(chain)
            chain = []
        yield from self._worth(chain)

    def _worth(self, chain: list[Node]) -> Iterator[list[Node]]:
        if sum(bool(self._records[node.name].forward) for node in chain) > 1:
            yield chain

    def bytes_of(self, chain: Sequence[Node]) -> tuple[int, int]:
        """Moved by its forward and by its backward."""
        inside = {node.name for node in chain}
        given = {self._owner.get(ref.name, ref.name) for node in chain for ref in node.operands()} - inside
        made = [node for node in chain if self._owner[node.name] == node.name]
        outer = [
            node for node in made if self._users.get(node.name, set()) - inside or node.name in self._returned
        ]
        saved = {each.memory: each.num_bytes for node in chain for each in self._records[node.name].kept}
        written = {node.name for node in outer} | (inside & self._kept)
        there = sum(self._bytes(name) for name in (*given, *written))
        there += sum(size for memory, size in saved.items() if ":" in memory)
        if not any(self._records[node.name].backward for node in chain):
            return there, 0
        gradients = sum(self._bytes(node.name) for node in outer if node.outputs[0].requires_grad)
        handed_back = sum(
            self._bytes(name) for name in given if any(each.requires_grad for each in self._metas[name][:1])
        )
        return there, gradients + handed_back + sum(saved.values())

    def _bytes(self, name: str) -> int:
        return sum(each.num_bytes for each in self._metas[name][:1])

"""Replaces the operators that stand for folded calls (`folding.py`) by copies of the traced nodes.

enter([h], [w0, b0], 1);  a = linear(h, w0, b0);  leave([a], 1)        a = linear(h, w0, b0)
y = repeat([a], [w1, b1], 1)                                           y = linear(a, w1, b1)
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

from meshloom.program.ir.contexts import Autocast, Context
from meshloom.program.ir.nodes import Node, Ref, refs_in, renamed
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import bits_of, is_sparse
from meshloom.program.ir.step_input import STEP
from meshloom.program.trace.block_calls import (
    ENTER,
    LEAVE,
    REPEAT,
    REPEAT_SEVERAL,
    ShortcutError,
    path_of_call,
)

SMALL = 4096  # elements of a constant that is compared with others


def unfolded(program: Program) -> Program:
    """The program with all nodes. Names, draws and autocast regions are numbered in their order.

    Raises `ShortcutError`.
    """
    constants, instead = _distinct(program.constants)
    unfolding = _Unfolding(program, instead)
    nodes, names = _numbered(program, unfolding.nodes)
    order = {name: place for place, name in enumerate(program.buffers)}
    return replace(
        program,
        constants=constants,
        nodes=nodes,
        outputs=renamed(unfolding.of(program.outputs), names),
        updates={
            name: renamed(unfolding.of(each), names)
            for name, each in sorted(unfolding.updates.items(), key=lambda item: order[item[0]])
        },
        in_place=frozenset(unfolding.in_place),
    )


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A traced call. given: its inputs, also its parameters and buffers. start, stop: of its nodes."""

    path: str
    context: Context
    given: tuple[str, ...]
    start: int
    stop: int
    made: tuple[str, ...]


class _Unfolding:
    """nodes: of the unfolded program. updates, in_place: likewise."""

    def __init__(self, program: Program, instead: Mapping[str, str]) -> None:
        self.nodes: list[Node] = []
        self.updates = dict(program.updates)
        self.in_place = set(program.in_place)
        self._program = program
        self._buffers = {each.value: name for name, each in program.buffers.items()}
        self._there = {
            each.value for each in (*program.parameters.values(), *program.buffers.values())
        } | set(program.constants)
        self._there |= {each.value for each in program.inputs if each.name == STEP}
        # result of a repeat, or an element of one, or a constant -> the value to use instead
        self._instead = dict(instead)
        self._picks: dict[str, tuple[str, ...]] = {}  # repeat with several results -> these
        self._blocks: dict[int, _Block] = {}
        self._used: dict[int, _Block] = {}
        self._regions = itertools.count(
            1 + max((each.number for node in program.nodes for each in node.context.autocast), default=0)
        )
        self._copies = 0
        self._walk(program.nodes)
        if self._blocks:
            self._check_leaks()
            self._drop_unused()

    def of(self, value: Any) -> Any:
        """A value, or what replaces it."""
        return renamed(value, self._instead)

    def _walk(self, nodes: Sequence[Node]) -> None:
        opened: dict[int, tuple[Node, int]] = {}
        for node in nodes:
            if node.target is ENTER:
                opened[node.args[2]] = node, len(self.nodes)
            elif node.target is LEAVE:
                made, call = node.args
                enter, start = opened.pop(call)
                given = tuple(ref.name for ref in refs_in(self.of(enter.args)))
                self._blocks[call] = _Block(
                    path=path_of_call(enter), context=enter.context, given=given, start=start, stop=len(self.nodes), made=tuple(ref.name for ref in self.of(made))
                )  # fmt: skip
            elif node.target in (REPEAT, REPEAT_SEVERAL):
                self._copy(node)
            elif node.target is operator.getitem and node.args[0].name in self._picks:
                self._instead[node.name] = self._picks[node.args[0].name][node.args[1]]
            else:
                self.nodes.append(node.with_operands(self._instead))

    def _copy(self, stand_in: Node) -> None:
        """Append copies of the nodes of a traced call."""
        block = self._blocks[stand_in.args[2]]
        given = [ref.name for ref in refs_in(self.of(stand_in.args[:2]))]
        names: dict[str, str] = {}
        if len(given) != len(block.given) or any(
            names.setdefault(one, other) != other for one, other in zip(block.given, given, strict=True)
        ):
            raise ShortcutError(
                f"{path_of_call(stand_in)} and {block.path} share their tensors in different ways."
            )
        nodes, path = self.nodes[block.start : block.stop], path_of_call(stand_in)
        if stand_in.args[2] not in self._used:
            self._check_inputs(block, nodes)
            self._used[stand_in.args[2]] = block
        self._copies += 1
        regions: dict[int, int] = {}
        state = dict(names)
        names |= {node.name: f"{node.name}@{self._copies}" for node in nodes}
        for node in nodes:
            self.nodes.append(
                node.with_operands(
                    names,
                    name=names[node.name],
                    path=_path_in_copy(node.path, block.path, path),
                    context=self._context(node.context, block.context, stand_in.context, regions),
                )
            )
        self._update(state, names)
        made = tuple(names.get(name, name) for name in block.made)
        if stand_in.target is REPEAT:
            (self._instead[stand_in.name],) = made
        else:
            self._picks[stand_in.name] = made

    def _check_inputs(self, block: _Block, nodes: Sequence[Node]) -> None:
        """Check that a copied call uses only its inputs and the program's variables."""
        known = {*block.given, *self._there, *(node.name for node in nodes)}
        for node in nodes:
            if any(ref.name not in known for ref in node.operands()):
                raise ShortcutError(
                    f"{node.operator} in {block.path} uses a value that is no input of the call."
                )

    def _update(self, state: Mapping[str, str], names: Mapping[str, str]) -> None:
        """Buffers that the copy updates. state: value of the traced call -> that of the copy."""
        for value, other in state.items():
            name = self._buffers.get(value)
            if name is None or other not in self._buffers:
                continue
            if name in self.in_place:
                self.in_place.add(self._buffers[other])
            updated = self.of(self.updates[name]) if name in self.updates else None
            if updated is not None and updated.name in names:
                if self._buffers[other] in self.updates:
                    raise ShortcutError(f"{self._buffers[other]} is written more than once.")
                self.updates[self._buffers[other]] = Ref(names[updated.name])

    def _context(
        self, context: Context, of_block: Context, of_copy: Context, regions: dict[int, int]
    ) -> Context:
        """A context inside a traced call as one inside its copy, with autocast regions of its own."""
        opened = context.autocast[len(of_block.autocast) :]
        for each in opened:
            if each.number not in regions:
                regions[each.number] = next(self._regions)
        own = tuple(replace(each, number=regions[each.number]) for each in opened)
        return replace(context, autocast=(*of_copy.autocast, *own))

    def _check_leaks(self) -> None:
        """Check that values inside a copied call are used only there, except its results."""
        for block in self._used.values():
            inside = {node.name for node in self.nodes[block.start : block.stop]} - set(block.made)
            outside = itertools.chain(self.nodes[: block.start], self.nodes[block.stop :])
            if any(ref.name in inside for node in outside for ref in node.operands()) or any(
                ref.name in inside for ref in refs_in(self.of(self._program.outputs))
            ):
                raise ShortcutError(f"A value inside {block.path} is used outside of it.")

    def _drop_unused(self) -> None:
        """Drop unused inputs of calls; nodes that draw or update a buffer stay."""
        program = self._program
        read = {ref.name for node in program.nodes for ref in node.operands()}
        unread = {node.name for node in program.nodes} - read
        written = {each.value for name, each in program.buffers.items() if name in self.in_place}
        used = {ref.name for ref in refs_in(self.of((program.outputs, tuple(self.updates.values()))))}
        needed: list[Node] = []
        for node in reversed(self.nodes):
            operands = [ref.name for ref in node.operands()]
            has_effect = node.num_draws or not written.isdisjoint(operands)
            if has_effect or node.name in used or node.name.partition("@")[0] in unread:
                used.update(operands)
                needed.append(node)
        self.nodes = needed[::-1]


def _distinct(constants: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Small constants without duplicates, which identical calls create, and name -> the equal one to use."""
    distinct: dict[str, Tensor] = {}
    instead: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, each in constants.items():
        if isinstance(each, FakeTensor) or is_sparse(each) or each.numel() > SMALL:
            distinct[name] = each
            continue
        bits = bits_of(each).numpy().tobytes()
        known = first.setdefault((each.dtype, each.device, tuple(each.shape), each.stride(), bits), name)
        if known == name:
            distinct[name] = each
        else:
            instead[name] = known
    return distinct, instead


def _path_in_copy(path: str, source: str, target: str) -> str:
    """A path below `source` as one below `target`; others stay.

    >>> _path_in_copy("h.0.mlp", "h.0", "h.7"), _path_in_copy("h.01", "h.0", "h.7")
    ('h.7.mlp', 'h.01')
    """
    return target + path[len(source) :] if path == source or path.startswith(f"{source}.") else path


def _numbered(program: Program, nodes: Sequence[Node]) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The nodes with new names, draws and regions, and old name -> new name."""
    variables = (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    taken = {each.value for each in variables} | set(program.constants)
    count: Counter[str] = Counter()
    names: dict[str, str] = {}
    regions: dict[int, Autocast] = {}
    contexts: dict[Context, Context] = {}
    made: list[Node] = []
    draws = 0
    for node in nodes:
        base = _base(node.target)
        while (name := f"{base}_{count[base]}" if count[base] else base) in taken:
            count[base] += 1
        count[base] += 1
        names[node.name] = name
        if node.context not in contexts:
            own = tuple(
                regions.setdefault(each.number, replace(each, number=len(regions)))
                for each in node.context.autocast
            )
            contexts[node.context] = replace(node.context, autocast=own)
        made.append(
            node.with_operands(
                names, name=name, context=contexts[node.context], draw=draws if node.num_draws else None
            )
        )
        draws += node.num_draws
    return tuple(made), names


def _base(target: Any) -> str:
    """Base of a node's name: its operator, without the overload."""
    schema = getattr(target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema is not None else target.__name__

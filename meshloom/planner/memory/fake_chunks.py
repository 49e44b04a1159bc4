"""What every operator of a program allocates and frees in the chunks of a step, found on fake tensors.

    phases     0 and 1 are forward and backward of the first chunk, 2 and 3 those of the second; a backward goes through the nodes in reverse
    events     bytes allocated, or freed if negative, while a node or its backward runs

Of identical blocks only a few are run (`program/cost/shortened.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor

from meshloom.planner.memory.tensor_lifetimes import Event, Life, Noted
from meshloom.program.cost.cost_fake import (
    fake_buffers,
    fake_inputs,
    fake_parameters,
    leaves,
    loss_of,
    next_number,
    number_here,
    run_backward,
    run_nodes,
)
from meshloom.program.cost.shortened import node_by_node, stand_in
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import memory_of, storage_of

# piece -> from which node on what becomes of it becomes of others as well, and how many they are
_Copies = dict[int, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a node. before: the bytes that it allocated earlier and that are there when the phase
    begins."""

    before: Event = (0, 0)
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of a parameter. memory: a parameter whose gradient shares the same memory, of so many
    bytes. tensor: one like it; None if it is freed."""

    parameter: str
    memory: str
    num_bytes: int
    tensor: Tensor | None = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class NodeLife:
    """The allocations of one node. kept: [chunk], bytes that it allocated and that are saved for the chunk's
    backward. gradients: of the parameters that it is the first to use, by their values' names, when all
    chunks are done."""

    phases: tuple[Phase, ...]
    kept: tuple[int, ...]
    gradients: tuple[Gradient, ...]


def chunks_of(program: Program, num_chunks: int, *, bucketed: bool) -> dict[str, NodeLife]:
    """The allocations of every node, inside `fake_tensors`. bucketed: a gradient is freed as soon as it is
    computed."""
    return node_by_node(program, lambda given: _run(given, num_chunks, bucketed=bucketed), _renamed)


def worst_of(lives: Sequence[NodeLife], phase: int) -> Event:
    """The largest number of bytes alive at one time in a phase, and how many of them are neither saved
    activations nor gradients. lives: of the nodes in order."""
    phases = [each.phases[phase] for each in (reversed(lives) if phase % 2 else lives)]
    return worst(
        (sum(each.before[0] for each in phases), sum(each.before[1] for each in phases)),
        chain.from_iterable(each.events for each in phases),
    )


def worst(before: Event, events: Iterable[Event]) -> Event:
    """The largest number of bytes at one time, from those before and those allocated and freed."""
    total, other = most = before
    for change, unknown in events:
        total += change
        other += unknown
        most = max(most, (total, other))
    return most


def _renamed(life: NodeLife, names: Mapping[str, str]) -> NodeLife:
    if not life.gradients:
        return life
    gradients = [
        replace(
            each,
            parameter=names.get(each.parameter, each.parameter),
            memory=names.get(each.memory, each.memory),
        )
        for each in life.gradients
    ]
    return replace(life, gradients=tuple(gradients))


def _run(program: Program, num_chunks: int, *, bucketed: bool) -> dict[str, NodeLife]:
    parameters = fake_parameters(program)
    trainable = {
        each.value: parameters[name]
        for name, each in program.parameters.items()
        if parameters[name].requires_grad
    }
    done: dict[str, None] = {}

    def take(value: str, parameter: Tensor) -> None:
        done[value] = None
        if bucketed:
            parameter.grad = None

    for value, parameter in trainable.items():
        parameter.register_post_accumulate_grad_hook(lambda each, value=value: take(value, each))
    given = leaves(program, parameters, fake_buffers(program), fake_inputs(program))
    life = Life([*given.values()])
    phases: list[Mapping[int, Phase]] = []
    kept: list[Mapping[int, int]] = []
    for _ in range(num_chunks):
        forward, backward, held, copies = _chunk(program, dict(given), life, trainable)
        known = held | life.pieces_of(_gradients(trainable))
        phases += [_by_node(life, each, known, copies) for each in (forward, backward)]
        kept.append(life.bytes_by_node(held))
    gradients = _gradients_by_node(program, {value: trainable[value] for value in trainable if value in done})
    return {
        node.name: NodeLife(
            phases=tuple(each.get(number, Phase()) for each in phases),
            kept=tuple(each.get(number, 0) for each in kept),
            gradients=tuple(gradients.get(number, ())),
        )
        for number, node in enumerate(program.nodes)
    }


def _chunk(
    program: Program, values: dict[str, Any], life: Life, trainable: Mapping[str, Tensor]
) -> tuple[Noted, Noted, set[int], _Copies]:
    """Forward and backward; returns the pieces that are saved from one to the other, and those that represent
    others too."""
    last = len(program.nodes) - 1
    firsts = [next_number()]  # the first sequence number of each node's autograd nodes
    copies: _Copies = {}
    joins = _joins(program)
    with life.noted(lambda: min(len(firsts) - 1, last)) as forward:
        for node in run_nodes(program, values, keep=False):
            firsts.append(next_number())
            if node.name in joins:
                for piece in life.pieces_of([values[node.name]]):
                    copies[piece] = joins[node.name]
        loss = loss_of(program, values)
        values.clear()
    held = life.alive - life.pieces_of(_gradients(trainable))
    with life.noted(
        lambda: min(bisect_right(firsts, number) - 1, last) if (number := number_here()) is not None else None
    ) as backward:
        run_backward(loss)
        del loss
    return forward, backward, held, copies


def _joins(program: Program) -> dict[str, tuple[int, int]]:
    """The last value of each repetition that represents repetitions left out -> where these are first used,
    and their number."""
    number: dict[str, list[str]] = {}
    for node in program.nodes:
        if node.target is stand_in:
            number.setdefault(node.args[0].name, []).append(node.name)
    first = _first_uses(program) if number else {}
    return {names[-1]: (min(first[name] for name in names), len(names)) for names in number.values()}


def _first_uses(program: Program) -> dict[str, int]:
    """Value -> the number of the first node that uses it."""
    last_to_first = reversed(list(enumerate(program.nodes)))
    return {ref.name: number for number, node in last_to_first for ref in node.operands()}


def _by_node(life: Life, noted: Noted, known: set[int], copies: _Copies) -> dict[int, Phase]:
    before: dict[int, Event] = {}
    for piece in noted.before:
        total, other = before.get(life.maker(piece), (0, 0))
        made, unknown = life.event(piece, known)
        before[life.maker(piece)] = total + made, other + unknown
    events: dict[int, list[Event]] = {}
    for node, piece in noted.log:
        used_at, others = copies.get(piece if piece >= 0 else ~piece, (node + 1, 0))
        events.setdefault(node, []).extend(
            [life.event(piece, known)] * (1 + others if node >= used_at else 1)
        )
    return {
        node: Phase(before=before.get(node, (0, 0)), events=tuple(events.get(node, ())))
        for node in before.keys() | events.keys()
    }


def _gradients(trainable: Mapping[str, Tensor]) -> list[Tensor]:
    return [each.grad for each in trainable.values() if each.grad is not None]


def _gradients_by_node(program: Program, done: Mapping[str, Tensor]) -> dict[int, list[Gradient]]:
    """By the first node that uses the parameter."""
    owners: dict[int, str] = {}
    found: dict[int, list[Gradient]] = {}
    first = _first_uses(program)
    for value, parameter in done.items():
        gradient = parameter.grad
        memory = owners.setdefault(memory_of(gradient), value) if gradient is not None else value
        num_bytes = int(storage_of(gradient).nbytes()) if gradient is not None else 0
        found.setdefault(first[value], []).append(
            Gradient(parameter=value, memory=memory, num_bytes=num_bytes, tensor=gradient)
        )
    return found

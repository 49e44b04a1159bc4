"""Analyses a program with a long run of identical blocks by way of four of them.

The first and the last block have other neighbours than the rest. The two in between must have equal results,
or the whole program is analysed.

    run         ... b0 b1 b2 b3 b4 ... b97 b98 b99 ...         results of b0 for b0, of b1 for b1 to b98, of
    b3 for b99 shortened   ... b0 b1 b2 b3                    ...

Runs are shortened one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshloom.program.cost.repeated_blocks import OperandTable, Run
from meshloom.program.ir.nodes import Node, Ref, renamed
from meshloom.program.ir.program import Program

T = TypeVar("T")
Names = Mapping[str, str]
FIRST, INNER, LAST = 0, 1, 3  # of the blocks that are kept
NUM_KEPT = LAST + 1
MIN_SHARE = 8  # leaving out less than one of so many operators is not worth it


def node_by_node(
    program: Program,
    analyse: Callable[[Program], Mapping[str, T]],
    renamed: Callable[[T, Names], T] = lambda result, _: result,
) -> dict[str, T]:
    """The results of `analyse` for every node of a program, by name; it may get a shorter program.

    renamed: a node's result with values replaced by those of another block; values not in the mapping stay.
    """
    short = shortened(program)
    if short is None:
        return dict(analyse(program))
    results = node_by_node(short.program, analyse, renamed)
    to_next = short.names(INNER, INNER + 1)
    if any(renamed(results[name], to_next) != results[to_next[name]] for name in short.block(INNER)):
        return dict(analyse(program))
    num_blocks = short.run.num_blocks
    to_last = short.names(LAST, num_blocks - 1)
    whole = {node.name: results[node.name] for node in program.nodes[: short.run.start]}
    for number in range(num_blocks):
        source = FIRST if number == 0 else LAST if number == num_blocks - 1 else INNER
        names = to_last if source == LAST else short.names(source, number)
        for one, name in zip(short.block(source), short.block(number), strict=True):
            whole[name] = renamed(results[one], names)
    for node in program.nodes[short.run.end :]:
        whole[node.name] = renamed(results[node.name], to_last)
    return whole


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """A program without most blocks of a run. whole: the program with all of them.

    variables: [block], the parameters, buffers and constants that only it uses, in the order of their use.
    """

    program: Program
    whole: Program
    run: Run
    variables: Sequence[Sequence[str]]

    def block(self, number: int) -> list[str]:
        """Its nodes."""
        first = self.run.first_of(number)
        return [node.name for node in self.whole.nodes[first : first + self.run.period]]

    def names(self, source: int, target: int) -> dict[str, str]:
        """Values of a block and the one before -> their counterparts in another and the one before."""
        names: dict[str, str] = {}
        for back in (1, 0):
            if min(source, target) >= back:
                names.update(zip(self.block(source - back), self.block(target - back), strict=True))
                names.update(zip(self.variables[source - back], self.variables[target - back], strict=True))
        return names


def shortened(program: Program, kept: int = NUM_KEPT) -> Shortened | None:
    """The program with so many blocks of its longest run; None if there is no run worth it. kept: `NUM_KEPT` or more."""
    operators = OperandTable(program, unique=stand_in)
    min_blocks = NUM_KEPT + 1
    longest: Run | None = None
    most = len(program.nodes) // MIN_SHARE
    for period in operators.periods(min_blocks=min_blocks):
        if longest is not None and period % longest.period == 0:
            continue
        for run in operators.runs(period, min_blocks=min_blocks):
            if (run.num_blocks - NUM_KEPT) * period > most:
                longest, most = run, (run.num_blocks - NUM_KEPT) * period
    if longest is None or longest.num_blocks <= kept:
        return None
    return _without_most_blocks(program, longest, operators, kept)


def _without_most_blocks(program: Program, run: Run, operators: OperandTable, kept: int) -> Shortened:
    first, end, period = run.first_of(kept), run.end, run.period  # of what is left out
    variables = [
        operators.variables_used(run.first_of(number), run.first_of(number + 1))
        for number in range(run.num_blocks)
    ]
    shared = set(variables[0]).intersection(*variables[1:])  # what two use in the same place all do
    variables = [[name for name in names if name not in shared] for names in variables]
    names = {
        node.name: program.nodes[place].name
        for place, node in enumerate(program.nodes[end - period : end], first - period)
    }
    names |= zip(variables[-1], variables[kept - 1], strict=True)
    stand_ins: list[Node] = []
    for offset in run.joined:
        like = program.nodes[run.first_of(INNER + 1) + offset]
        last = program.nodes[end - period + offset].name
        names[program.nodes[first - period + offset].name] = (
            last  # the last kept block is now the last of all; its former values get other names
        )
        gone = [last, *(program.nodes[place + offset].name for place in range(first, end - period, period))]
        stand = replace(like, target=stand_in, args=(Ref(like.name),), kwargs={}, draw=None, num_draws=0)
        stand_ins += [replace(stand, name=name) for name in gone]
    left_out = {node.name for node in program.nodes[first:end]}
    nodes = (
        *program.nodes[: first - period],
        *stand_ins,
        *program.nodes[first - period : first],
        *(node.with_operands(names) for node in program.nodes[end:]),
    )
    used = {ref.name for node in nodes for ref in node.operands()}
    unused = set(chain.from_iterable(variables[kept:])) - used
    buffers = {name: each for name, each in program.buffers.items() if each.value not in unused}
    short = replace(
        program,
        nodes=nodes,
        parameters={name: each for name, each in program.parameters.items() if each.value not in unused},
        buffers=buffers,
        in_place=program.in_place & buffers.keys(),
        constants={name: each for name, each in program.constants.items() if name not in unused},
        outputs=renamed(program.outputs, names),
        updates={name: ref for name, ref in program.updates.items() if ref.name not in left_out},
    )
    return Shortened(program=short, whole=program, run=run, variables=variables)


def stand_in(like: Tensor) -> Tensor:
    """Another value with the memory layout of this one (here in the same memory). It takes a gradient if this
    one does, and propagates none."""
    return _StandIn.apply(like)  # pyright: ignore[reportReturnType]


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor) -> Tensor:
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None

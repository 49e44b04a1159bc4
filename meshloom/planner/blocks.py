"""A model as a tree of blocks, each with its costs including all blocks inside of it; identical blocks are
merged.

GPT                          GPT
  blocks.0  Block              token      Embedding
    attention  Attention       blocks.0-1 Block      x2     sums over both
    mlp        MLP               attention Attention x2
  blocks.1  Block     --->       mlp       MLP       x2
    ...                        head       Linear
  head      Linear
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from meshloom.machine.machine import Machine
from meshloom.program.cost.cost import Cost
from meshloom.program.cost.program_seconds import Seconds, node_seconds
from meshloom.program.ir.program import Program

_SUMMED = ("parameters", "parameter_bytes", "kept_bytes", "flops", "backward_flops", "operators")
_HOLDERS = ("ModuleList", "ModuleDict")  # they have no forward of their own: their children take their place


@dataclass(frozen=True, kw_only=True)
class Block:
    """A module, or `count` identical modules; every number is a sum over them and all modules inside.

    path: of the module, from the model: `blocks.0-95` for several. name: the same from the enclosing block.
    module: its class. parameters: elements, tied ones once, at the first module that has them. kept_bytes:
    activations that autograd saves for backward, each memory once, at the first module that saves it; without
    state and batch. operators: their number. seconds: predicted, if the machine is known. inside: the blocks
    in it, in the order of the model.
    """

    path: str
    name: str
    module: str
    count: int = 1
    parameters: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0
    flops: int = 0
    backward_flops: int = 0
    operators: int = 0
    seconds: Seconds | None = None
    inside: tuple[Block, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it has no blocks inside and no operators of its own."""
        return not (self.parameters or self.operators or self.kept_bytes)


def blocks_of(
    program: Program, costs: Mapping[str, Cost], modules: Mapping[str, str], machine: Machine | None = None
) -> Block:
    """The whole model as a block. modules: path -> class of every module, '' being the model, in the model's
    order."""
    none = Seconds() if machine else None
    own = {
        path: Block(path=path, name=path, module=modules.get(path, ""), seconds=none)
        for path in ["", *modules]
    }
    variables = (*program.parameters.values(), *program.buffers.values())
    given = {*(each.value for each in (*variables, *program.inputs)), *program.constants}
    for name, variable in program.parameters.items():
        count = math.prod(variable.meta.shape)
        _add(own, name.rpartition(".")[0], parameters=count, parameter_bytes=variable.meta.num_bytes)
    for node in program.nodes:
        cost = costs[node.name]
        kept = {each.memory: each.num_bytes for each in cost.kept if each.memory not in given}
        given.update(kept)
        seconds = node_seconds(node, cost, machine) if machine else None
        _add(
            own, node.path, kept_bytes=sum(kept.values()), flops=cost.flops, backward_flops=cost.backward_flops, operators=1, seconds=seconds
        )  # fmt: skip
    below: dict[str, list[str]] = {}
    for path in own:
        if path:
            parent = path.rpartition(".")[0]
            below.setdefault(parent if parent in own else "", []).append(path)
    return _with_paths(_tree("", own, below), "")


def rows_of(whole: Block, depth: int | None = None) -> Iterator[tuple[int, Block]]:
    """(level, block) of the blocks to show, with the model's own children at level 1; after the blocks inside
    of a block, the block's own operators.

    depth: levels to show. None: as long as a block has a quarter of the FLOPs or of the parameters, until
    there are several identical ones.
    """
    yield from _rows(whole, whole, 1, depth)


def _rows(block: Block, whole: Block, level: int, depth: int | None) -> Iterator[tuple[int, Block]]:
    for each in block.inside:
        yield level, each
        if each.inside and (level < depth if depth is not None else _is_large(each, whole)):
            yield from _rows(each, whole, level + 1, depth)
    itself = reduce(_less, block.inside, block)
    if not itself.is_empty:
        name = "(own forward)" if level > 1 else "(own forward and loss)"
        yield level, replace(itself, path=f"{block.path}:own", name=name, module="", inside=())


def _is_large(block: Block, whole: Block) -> bool:
    """Whether it has a quarter of the model and is not one of several identical blocks."""
    if block.name.rpartition(".")[2][:1].isdecimal():
        return False
    work = 4 * (block.flops + block.backward_flops) > whole.flops + whole.backward_flops
    return work or 4 * block.parameters > whole.parameters


def _tree(path: str, own: Mapping[str, Block], below: Mapping[str, Sequence[str]]) -> Block:
    inside: list[Block] = []
    for child in below.get(path, ()):
        block, name = _tree(child, own, below), child.removeprefix(f"{path}.") if path else child
        if block.module in _HOLDERS and not own[child].operators:
            inside.extend(replace(each, name=f"{name}.{each.name}") for each in block.inside)
        else:
            inside.append(replace(block, name=name))
    inside = _alike([each for each in inside if not each.is_empty])
    return replace(reduce(_plus, inside, own[path]), inside=tuple(inside))


def _alike(blocks: list[Block]) -> list[Block]:
    """Merges numbered blocks of one container that have the same signature, at the place of the first of
    them; single layers only if they are neighbours."""
    groups: dict[object, list[Block]] = {}
    run = 0
    for before, block in zip([None, *blocks], blocks, strict=False):
        prefix, _, number = block.name.rpartition(".")
        signature = _signature(block)
        run += before is None or _signature(before) != signature
        key = (prefix, signature, 0 if block.inside else run) if number.isdecimal() else block.name
        groups.setdefault(key, []).append(block)
    return [_numbered(group) for group in groups.values()]


def _signature(block: Block) -> object:
    """What must be equal in identical blocks. Saved activations and backward are left out: they depend on the
    blocks before."""
    inside = tuple((each.name, _signature(each)) for each in block.inside)
    return block.module, block.parameters, block.flops, block.operators, inside


def _merged(group: Sequence[Block]) -> Block:
    inside = tuple(_merged(each) for each in zip(*(block.inside for block in group), strict=True))
    return replace(reduce(_plus, group[1:], group[0]), count=sum(each.count for each in group), inside=inside)


def _numbered(group: Sequence[Block]) -> Block:
    if len(group) == 1:
        return group[0]
    prefix, dot, _ = group[0].name.rpartition(".")
    numbers = _numbers([int(each.name.rpartition(".")[2]) for each in group])
    return replace(_merged(group), name=f"{prefix}{dot}{numbers}")


def _with_paths(block: Block, parent: str) -> Block:
    path = f"{parent}.{block.name}" if parent else block.name
    return replace(block, path=path, inside=tuple(_with_paths(each, path) for each in block.inside))


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers in order, abbreviated.

    >>> _numbers([0, 1, 2, 3]), _numbers([1, 2, 5]), _numbers([0, 2, 4, 6, 8]), _numbers([0, 3, 4, 9, 11, 20, 22, 24])
    ('0-3', '1-2,5', '0,2..8', '0,3-4,9..24')
    """
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ",".join(texts) if len(texts) <= 4 else f"{','.join(texts[:3])}..{numbers[-1]}"


def _add(own: dict[str, Block], path: str, **numbers: Any) -> None:
    """Adds numbers to the module of that path, or to the nearest enclosing one."""
    while path not in own:
        path = path.rpartition(".")[0]
    own[path] = _plus(own[path], Block(path="", name="", module="", **numbers))


def _plus(one: Block, other: Block) -> Block:
    return _combined(one, other, 1)


def _less(one: Block, other: Block) -> Block:
    return _combined(one, other, -1)


def _combined(one: Block, other: Block, sign: int) -> Block:
    seconds = one.seconds
    if one.seconds and other.seconds:
        seconds = Seconds(
            forward=max(0.0, one.seconds.forward + sign * other.seconds.forward),
            backward=max(0.0, one.seconds.backward + sign * other.seconds.backward),
        )
    numbers = {name: getattr(one, name) + sign * getattr(other, name) for name in _SUMMED}
    return replace(one, **numbers, seconds=seconds)

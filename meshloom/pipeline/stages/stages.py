"""A program cut into stages: a program for each, and the values sent between them.

    program    n0 -> n1 -> n2 -> n3 -> n4 -> loss             stage of every node: 0 0 1 1 1
    stage 0    n0 -> n1 ------+                               sends the result of n1
    stage 1                   +-> n2 -> n3 -> n4 -> loss      receives it, and sends its gradient back

A value that several later stages use is sent to each of them from the stage that computes it. Values computed
from the batch alone (masks, positions) are not sent: every stage that uses them computes them, since all have
the batch. Parameters that several stages use are held by each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from meshloom.core.errors import CaptureError
from meshloom.program.ir.draws import passing_over_draws
from meshloom.program.ir.nodes import Input, Meta, Node, Ref, lists_in, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.run.runner import used_variables

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A value sent from one stage to a later one. meta.requires_grad: its gradient comes back."""

    value: str
    source: int
    destination: int
    meta: Meta

    @property
    def num_bytes(self) -> int:
        """In one direction."""
        return self.meta.num_bytes


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage. program: its inputs are the batch's tensors that it uses, then `incoming`; it returns, flat,
    `outgoing` and what the loss returned.

    outgoing: values in order, each once. returned: the structure of what the loss returned; the last stage
        returns it, flat, after `outgoing`.
    """

    number: int
    program: Program
    incoming: tuple[Crossing, ...]
    outgoing: tuple[Crossing, ...]
    returned: TreeSpec

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of the values that it sends, each once."""
        return tuple(dict.fromkeys(each.value for each in self.outgoing))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it uses."""
        return tuple(each.name for each in used_variables(self.program, self.program.parameters))

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that it reads."""
        return tuple(each.name for each in used_variables(self.program, self.program.buffers))

    @property
    def changing(self) -> frozenset[str]:
        """Names of the buffers that it updates."""
        return self.program.changing


def cut_into_stages(
    program: Program, stage_of: Mapping[str, int], num_stages: int, pinned: Collection[str] = ()
) -> tuple[Stage, ...]:
    """The stages of `program`. stage_of: node -> its stage; it moves to a later one with its operands.

    Raises `CaptureError` if several stages use a buffer that is updated: each would see another value.
    """
    return _Cutter(program, stage_of, num_stages, pinned).stages()


def with_places_behind_parts(program: Program, num_stages: int) -> Program:
    """The program with as many places to cut as stages need behind its last opaque part, which may be all that it
    computes: further stages hand its result on."""
    last = next((at for at, node in reversed([*enumerate(program.nodes)]) if is_opaque(node)), None)
    result = program.outputs[0]
    if last is None or num_stages == 1 or not isinstance(result, Ref):
        return program
    part = program.nodes[last].name
    behind = [node for node in program.nodes[last + 1 :] if all(ref.name != part for ref in node.operands())]
    made = next((node for node in program.nodes if node.name == result.name), None)
    if made is None or len(behind) >= num_stages - 1:
        return program
    handed = [
        replace(
            made, name=f"{made.name}_handed_on_{number}", target=aten.alias.default, args=(result,), kwargs={}, path="", draw=None, num_draws=0
        )
        for number in range(num_stages - 1)
    ]  # fmt: skip
    handed = [
        replace(node, args=(Ref(before.name),)) for before, node in zip((made, *handed), handed, strict=False)
    ]
    outputs = (Ref(handed[-1].name), *program.outputs[1:])
    return replace(program, nodes=(*program.nodes, *handed), outputs=outputs)


def users_of(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Parameter or buffer -> the stages that use it, in order, but the one that updates it first. What no
    stage uses belongs to the first."""
    program = stages[0].program
    found: dict[str, list[int]] = {name: [] for name in (*program.parameters, *program.buffers)}
    for stage in stages:
        for name in stage.changing:
            found[name].append(stage.number)
    for stage in stages:
        for name in (*stage.parameters, *stage.buffers):
            found[name].append(stage.number)
    return {name: tuple(dict.fromkeys(numbers)) or (0,) for name, numbers in found.items()}


class _Cutter:
    def __init__(
        self, program: Program, stage_of: Mapping[str, int], num_stages: int, pinned: Collection[str]
    ) -> None:
        self.program = program
        self.num_stages = num_stages
        self.by_name = {node.name: node for node in program.nodes}
        self.lists = lists_in(program.nodes)
        self.free = computed_from_batch(program, pinned)
        self.home = self._homes(stage_of)
        self.inputs = {each.value: each for each in program.inputs}

    def stages(self) -> tuple[Stage, ...]:
        last = self.num_stages - 1
        returned = [ref.name for ref in refs_in(self.program.outputs)]
        nodes = [self._nodes(stage, returned if stage == last else ()) for stage in range(self.num_stages)]
        crossings = [
            self._crossing(value, stage)
            for stage in range(self.num_stages)
            for value in self._foreign(stage, nodes[stage], returned if stage == last else ())
        ]
        return tuple(self._stage(stage, nodes[stage], crossings) for stage in range(self.num_stages))

    def _homes(self, stage_of: Mapping[str, int]) -> dict[str, int]:
        """Node -> its stage: as given, but not before its operands, and with its list of tensors."""
        home: dict[str, int] = {}
        for node in self.program.nodes:
            needed = [ref.name for ref in node.operands() if ref.name in home and ref.name not in self.free]
            stages = [home[name] for name in needed]
            stage = min(max([stage_of[node.name], *stages]), self.num_stages - 1)
            # Lists of tensors, and numbers, are not sent: nodes that take them apart stay with their source.
            parts = [home[ref.name] for ref in node.operands() if ref.name in self.lists]
            home[node.name] = min(stage, parts[0]) if parts and len(set(stages)) == 1 else stage
        for buffer, together in updating(self.program).items():
            stages = {home[name] for name in together}
            if len(stages) > 1:
                raise CaptureError(
                    f"Buffer {buffer} is updated in one stage and used in another ({', '.join(map(str, sorted(stages)))}). "
                    "Cut the model elsewhere, so that all of its uses are in one stage."
                )
        return home

    def _nodes(self, stage: int, returned: Iterable[str]) -> list[Node]:
        """In order: the stage's own nodes, and those computed from the batch that they use."""
        wanted = {name for name, home in self.home.items() if home == stage and name not in self.free}
        wanted |= {name for name in returned if name in self.free}
        if stage == 0:
            wanted |= {ref.name for ref in self.program.updates.values() if ref.name in self.free}
        for node in reversed(self.program.nodes):
            if node.name in wanted:
                wanted |= {ref.name for ref in node.operands() if ref.name in self.free}
        return [node for node in self.program.nodes if node.name in wanted]

    def _foreign(self, stage: int, nodes: Sequence[Node], returned: Iterable[str]) -> list[str]:
        """Values of other stages that this one uses, in order of use."""
        used = dict.fromkeys([*(ref.name for node in nodes for ref in node.operands()), *returned])
        return [name for name in used if name not in self.free and self.home.get(name, stage) != stage]

    def _crossing(self, value: str, destination: int) -> Crossing:
        source, node = self.home[value], self.by_name[value]
        if value in self.lists:
            raise CaptureError(
                f"The cut between stages {source} and {destination} splits {node.operator} at {node.line or node.path}, which returns "
                f"{len(node.outputs) or 'no'} tensors, but only single tensors can be sent between stages. Cut elsewhere."
            )
        return Crossing(
            value=value, source=source, destination=destination, meta=_without_gaps(node.outputs[0])
        )

    def _stage(self, number: int, nodes: Sequence[Node], crossings: Sequence[Crossing]) -> Stage:
        program = self.program
        incoming = tuple(each for each in crossings if each.destination == number)
        outgoing = tuple(each for each in crossings if each.source == number)
        own = {node.name for node in nodes if node.name not in self.free or number == 0}
        updates = {name: ref for name, ref in program.updates.items() if ref.name in own}
        sent = tuple(Ref(value) for value in dict.fromkeys(each.value for each in outgoing))
        outputs = (*sent, *program.outputs) if number == self.num_stages - 1 else sent
        used = {ref.name for node in nodes for ref in node.operands()}
        used |= {ref.name for ref in refs_in((outputs, tuple(updates.values())))}
        inputs = [each for each in program.inputs if each.value in used]
        inputs += [
            Input(value=each.value, name=f"from stage {each.source}: {each.value}", meta=each.meta)
            for each in incoming
        ]
        return Stage(
            number=number,
            program=replace(
                program,
                constants={name: each for name, each in program.constants.items() if name in used},
                inputs=tuple(inputs),
                nodes=_with_draws_in_place(_viewing_anything(nodes) if incoming else nodes),
                outputs=outputs,
                out_spec=tree_flatten([0] * len(outputs))[1],
                updates=updates,
                in_place=frozenset(name for name in program.in_place if program.buffers[name].value in used),
            ),
            incoming=incoming,
            outgoing=outgoing,
            returned=program.out_spec,
        )


def computed_from_batch(program: Program, pinned: Collection[str] = ()) -> frozenset[str]:
    """Nodes that depend only on the batch, constants and buffers that do not change, without draws or
    gradients: any stage can compute them. pinned: buffers that change in another program, so that not every stage has them."""
    moving = program.changing.union(pinned)
    steady = [each.value for name, each in program.buffers.items() if name not in moving]
    given = {*program.constants, *steady, *(each.value for each in program.inputs)}
    free: set[str] = set()
    for node in program.nodes:
        if node.num_draws or any(each.requires_grad for each in node.outputs):
            continue
        if all(ref.name in given or ref.name in free for ref in node.operands()):
            free.add(node.name)
    return frozenset(free)


def updating(program: Program) -> dict[str, set[str]]:
    """Buffer that changes -> the nodes that must share a stage: its readers and its new value's producer."""
    names = {program.buffers[name].value: name for name in program.changing}
    found: dict[str, set[str]] = {}
    for node in program.nodes:
        for ref in node.operands():
            if ref.name in names:
                found.setdefault(names[ref.name], set()).add(node.name)
    of_nodes = {node.name for node in program.nodes}
    for name, ref in program.updates.items():
        if name in found and ref.name in of_nodes:
            found[name].add(ref.name)
    return found


def _with_draws_in_place(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Draws are numbered within the chunk; numbers of other stages' draws are skipped."""
    found: list[Node] = []
    next_draw = 0
    for node in nodes:
        if node.num_draws:
            assert node.draw is not None
            if node.draw != next_draw:
                found.append(passing_over_draws(node, node.draw - next_draw))
            next_draw = node.draw + node.num_draws
        found.append(node)
    return tuple(found)


def _viewing_anything(nodes: Sequence[Node]) -> list[Node]:
    """Reshapes for views: expanded rows share memory on one device, but not after they are received."""
    return [
        replace(node, target=aten.reshape.default) if node.target is aten.view.default else node
        for node in nodes
    ]


def _without_gaps(meta: Meta) -> Meta:
    """The strides that torch gives a copy: unchanged if dense, else dense with dims in the same order."""
    copied = torch.empty_like(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta"))
    return replace(meta, stride=tuple(copied.stride()))

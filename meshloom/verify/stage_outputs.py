"""The first module whose output is wrong where ranks run programs: once something differs, the forwards of the step's chunks once more, by
all ranks together, as they have run them, but on parameters equal to one device's, held against the outputs of one device's modules.

Of each module the last value in its forward counts, and what that becomes where ranks add it up or gather it. Where that is the value of
a module within it, it counts as that one's alone. Each rank says sums of its part; nothing is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

from torch import Tensor

from meshloom.comm.objects import collect, gather_objects
from meshloom.data.chunks import Chunk
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.ir.nodes import Node
from meshloom.program.operators.collectives import Transition
from meshloom.replica.program_stages import ProgramStages
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import each_of_state
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part
from meshloom.tensor_parallel.search.strategies import Strategy
from meshloom.verify.compared.compare_chunks import add_outputs, first_wrong, output_error
from meshloom.verify.reference.observers import summary
from meshloom.verify.reference.reference import Reference, watching
from meshloom.verify.reference.step_records import ModuleOutput

Values = Mapping[str, Sequence[ModuleOutput]]  # by module; without a ramp: a part of what ranks have together
_COPY = re.compile(r"__\d+$")  # at the end of the name of a value that was sent


def values_of_modules(
    replica: Replica, chunks: Sequence[Chunk], adopt: Callable[[str, Tensor], None]
) -> dict[int, list[Values]]:
    """What ranks say of a step's chunks, run once more: on rank 0, number of a chunk -> of each rank that runs it, its modules' values. All ranks call it after a
    step, with their chunks of that step. adopt: what one device does with the plan's parameters first."""
    each_of_state(replica, adopt)
    stages = replica.engine.stages
    assert isinstance(stages, ProgramStages)
    filled = [chunk for chunk in chunks if chunk.samples]
    counts: list[int] = collect(replica.context.world, len(filled))
    mine = _values(stages, replica, filled, max(counts))
    of_chunks: dict[int, list[Values]] = {}
    for of_rank in gather_objects(replica.context.world, mine):
        for index, values in of_rank:
            of_chunks.setdefault(index, []).append(values)
    return of_chunks


def first_wrong_module(
    reference: Reference, of_chunks: Mapping[int, Sequence[Values]], tolerance: float
) -> str | None:
    """The first module, in one device's order, whose output differs from what ranks say of a chunk of the last step, the first chunk with
    one."""
    start = reference.buffers.snapshot()
    for forward in reference.forwards():
        numbers = [number for number, _ in forward.members]
        if len(numbers) == 1 and numbers[0] in of_chunks:
            reference.buffers.load(start)
            with watching(reference):
                outputs = reference.run_forward(forward).modules
            pairs = pairs_of_values(outputs, of_chunks[numbers[0]])
            if (found := first_wrong(pairs, tolerance)) is not None:
                return found
    return None


class ModuleSums:
    """This rank's sums of the last value in each module's forward, and of what is made of that. strategies: how operators are divided,
    by their nodes' names. stages: of the program whose values they are, on all ranks; called once there are values."""

    def __init__(self, strategies: Mapping[str, Strategy], stages: Callable[[], Sequence[Stage]]) -> None:
        self.found: dict[str, list[ModuleOutput]] = {}  # by module
        self._strategies, self._stages = strategies, stages
        self._paths: dict[str, str] = {}  # of the module's last value

    def visit(self, stage: int, node: Node, value: Any) -> None:
        """Of a program's values, in order."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        base = _COPY.sub("", node.name)
        if isinstance(node.target, Transition):
            if base in self._paths and node.target.target != "partial":
                is_part = node.target.target == "part" and not node.target.after.is_whole
                path = self._paths[base]
                self.found[path].append(_sums(path, value, is_part))
            return
        if self._ending_themselves.get(node.path) != stage:
            return
        placement = self._strategies[node.name].output if node.name in self._strategies else None
        self._paths[node.name] = node.path
        self.found[node.path] = (
            [] if placement == PARTIAL else [_sums(node.path, value, isinstance(placement, Part))]
        )

    @cached_property
    def _ending_themselves(self) -> dict[str, int]:
        """Modules whose last value is none of a module within them, with the stage that it is in, perhaps on another rank."""
        ending: dict[str, int] = {}
        for stage in self._stages():
            for node in stage.program.nodes:
                if not isinstance(node.target, Transition):
                    for each in re.finditer(r"\.", node.path):
                        ending.pop(node.path[: each.start()], None)
                    ending[node.path] = stage.number
        return ending


def _values(of: ProgramStages, replica: Replica, chunks: Sequence[Chunk], most: int) -> list[Any]:
    """What this rank says: of each of these chunks its number and, by module, what its programs compute, run as in the step. most: chunks of the replica
    that has most."""
    scope, loss = replica.scope, of.job.loss
    with replica.engine.computing("forwards", idle=not chunks):
        batches = [of.programs.ready(batch) for batch in [scope.data(chunk) for chunk in chunks]]
        sums: list[ModuleSums] = []
        for batch in batches:
            choice = of.programs.division_of(loss, training=True)
            stages = partial(of.programs.stages, batch.key)
            sums.append(ModuleSums(choice.strategies if choice else {}, stages))
        now = 0

        def around(stage: int, microbatch: int) -> AbstractContextManager[None]:
            nonlocal now
            now = microbatch
            return scope.draws(chunks[microbatch])

        def visit(stage: int, node: Node, value: Any) -> None:
            sums[now].visit(stage, node, value)

        if batches:
            of.microbatches.look(batches, around, visit, most=most)
    return [[chunk.index, each.found] for chunk, each in zip(chunks, sums, strict=True)]


def _sums(name: str, value: Tensor, is_part: bool) -> ModuleOutput:
    whole = summary(name, 0, value)
    return replace(whole, ramp=None) if is_part else whole


def pairs_of_values(
    outputs: Sequence[ModuleOutput], of_ranks: Sequence[Values]
) -> Iterator[tuple[ModuleOutput, ModuleOutput]]:
    """What ranks say of a module and what one device does, in its order, of modules of which ranks have as many elements. outputs: one
    device's; of several calls of a module the last counts."""
    last = {output.name: (number, output) for number, output in enumerate(outputs)}
    # in the order of these last calls
    for name, (_, right) in sorted(last.items(), key=lambda each: each[1][0]):
        for values in zip(*(each[name] for each in of_ranks if name in each), strict=False):
            ours = _ours([replace(value, call=right.call) for value in values], right)
            if name and ours.count == right.count:
                yield ours, right


def _ours(values: Sequence[ModuleOutput], right: ModuleOutput) -> ModuleOutput:
    """The sum of parts, or what ranks have whole; of a module that is called several times, in stages of several ranks perhaps, what is nearest."""
    if parts := [value for value in values if value.ramp is None]:
        return reduce(add_outputs, parts)
    return min(values, key=lambda each: output_error(each, right)) if right.call else values[0]

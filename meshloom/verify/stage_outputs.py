"""The first module whose output is wrong where ranks run programs: once something differs, the forward of one chunk by all ranks
together, on parameters equal to one device's, held against the outputs of one device's modules.

Of each module the last value in its forward counts, and what that becomes where ranks add it up or gather it. Where that is the value of
a module within it, it counts as that one's alone. Each rank says sums of its part; nothing is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

from torch import Tensor

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.data.chunks import Chunk
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.ir.nodes import Node
from meshloom.program.operators.collectives import Transition
from meshloom.replica.program_engine import ProgramEngine
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import each_of_state
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part
from meshloom.tensor_parallel.search.strategies import Strategy
from meshloom.verify.compared.compare_values import Value, Values, first_wrong_value
from meshloom.verify.reference.observers import ramp_of, sample_of
from meshloom.verify.reference.reference import Reference, watching

_COPY = re.compile(r"__\d+$")  # at the end of the name of a value that was sent


class Adopting(Protocol):
    """One device, that can take the plan's parameters."""

    def adopt(self, name: str, ours: Tensor) -> None:
        """Have this value of a parameter or buffer."""
        ...


def values_of_modules(
    replica: Replica, chunks: Sequence[Chunk], one_device: Adopting | None
) -> Steps[tuple[int, list[Values]]]:
    """The number of a chunk, -1 for none, and what all ranks that run it say of its modules, after `one_device` has the plan's
    parameters. All ranks call it after a step, with their chunks of that step."""
    yield from each_of_state(replica, one_device.adopt if one_device else _ignore)
    engine = replica.engine
    assert isinstance(engine, ProgramEngine)
    filled = [chunk for chunk in chunks if chunk.samples][:1]
    values = yield from _values(engine, replica, filled)
    index = filled[0].index if filled else -1
    everyone: list[Any] = yield from collect(replica.context.world, [index, values])
    return index, [each for other, each in everyone if other == index]


def first_wrong_module(
    reference: Reference, index: int, of_ranks: Sequence[Values], tolerance: float
) -> str | None:
    """The first module, in one device's order, whose output differs from what ranks say of this chunk of the last step."""
    forward = next(
        (each for each in reference.forwards() if [number for number, _ in each.members] == [index]), None
    )
    if forward is None:
        return None
    with watching(reference):
        outputs = reference.run_forward(forward).modules
    return first_wrong_value(outputs, of_ranks, tolerance)


def _ignore(*arguments: Any) -> None:
    """The reference is on another rank."""


class ModuleSums:
    """This rank's sums of the last value in each module's forward, and of what is made of that. strategies: how operators are divided,
    by their nodes' names. stages: of the program whose values they are, on all ranks; called once there are values. has_parts: whether ranks
    have parts of what is computed outside all modules, by a loss or metric."""

    def __init__(self, strategies: Mapping[str, Strategy], stages: Callable[[], Sequence[Stage]]) -> None:
        self.found: dict[str, list[Value]] = {}  # by module
        self.has_parts = False
        self._strategies, self._stages = strategies, stages
        self._paths: dict[str, str] = {}  # of the module's last value

    def visit(self, stage: int, node: Node, value: Any) -> None:
        """Of a program's values, in order."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        base = _COPY.sub("", node.name)
        if isinstance(node.target, Transition):
            self.has_parts = self.has_parts or (
                node.target.target == "part" and not self._paths.get(base, base)
            )
            if base in self._paths and node.target.target != "partial":
                is_part = node.target.target == "part" and not node.target.after.is_whole
                self.found[self._paths[base]].append(_sums(value, is_part=is_part))
            return
        if self._ending_themselves.get(node.path) != stage:
            return
        placement = self._strategies[node.name].output if node.name in self._strategies else None
        self._paths[node.name] = node.path
        is_part = placement == PARTIAL or (isinstance(placement, Part) and placement.cut is not None)
        self.has_parts = self.has_parts or (is_part and not node.path)
        self.found[node.path] = (
            [] if placement == PARTIAL else [_sums(value, is_part=isinstance(placement, Part))]
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


def _values(
    engine: ProgramEngine, replica: Replica, chunks: Sequence[Chunk]
) -> Steps[dict[str, list[Value]]]:
    """By module, what this rank's programs compute of these chunks."""
    sums: dict[str, list[Value]] = {}
    with engine.computing("rerun", idle=not chunks):
        batches = yield from engine.drawn.all_drawn(
            replica.scope.moments(chunks), engine.programs.losses.loss
        )
        for batch, chunk in zip(batches, chunks, strict=True):
            yield from engine.programs.ready(batch)
            key = engine.programs.key(batch)
            seen = ModuleSums(
                engine.division.first.choice.strategies if engine.division else {},
                partial(engine.programs.stages, key),
            )
            engine.microbatches.look(batch, _draws_of(replica, chunk), seen.visit)
            sums = seen.found
    return sums


def _draws_of(replica: Replica, chunk: Chunk) -> Any:
    return lambda stage, microbatch, rerun: replica.scope.draws(chunk)


def _sums(value: Tensor, *, is_part: bool) -> Value:
    exact = value.detach().double()
    sample = [] if is_part else sample_of(exact)
    return is_part, float(exact.sum()), float(exact.square().sum()), value.numel(), ramp_of(exact), sample

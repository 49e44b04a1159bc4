"""The first module whose output is wrong where ranks run programs: once something differs, the forward of one chunk by all ranks
together, on parameters equal to one device's, held against the outputs of one device's modules.

Of each module the last value in its forward counts, and what that becomes where ranks add it up or gather it. Each rank says sums
of its part; nothing is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.data.chunks import Chunk
from meshloom.program.ir.nodes import Node
from meshloom.program.operators.collectives import Transition
from meshloom.replica.program_engine import ProgramEngine
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import each_of_state
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part
from meshloom.verify.compared.compare_chunks import OutputSteps
from meshloom.verify.reference.observers import ramp_of
from meshloom.verify.reference.reference import Reference, watching
from meshloom.verify.reference.step_records import ModuleOutput

# whether it is a part of what ranks have together; total, sum of squares, elements, ramp of `ModuleOutput`
Value = tuple[bool, float, float, int, float]
Values = Mapping[str, Sequence[Value]]  # by module
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
    last, steps = {output.name: output for output in outputs}, OutputSteps(tolerance)  # of several calls
    for name, right in last.items():
        for values in _together([each[name] for each in of_ranks if name in each]):
            parts = [value for value in values if value[0]]
            ours = _added(name, right.call, parts) if parts else _added(name, right.call, values[:1])
            if name and ours.count == right.count and steps.differs(ours, right):
                return name
    return None


def _ignore(*arguments: Any) -> None:
    """The reference is on another rank."""


def _values(
    engine: ProgramEngine, replica: Replica, chunks: Sequence[Chunk]
) -> Steps[dict[str, list[Value]]]:
    """By module, this rank's sums of the last value in its forward, and of what is made of that."""
    found: dict[str, list[Value]] = {}
    paths: dict[str, str] = {}  # of the module's last value
    strategies = engine.division.first.choice.strategies if engine.division else {}

    def visit(stage: int, node: Node, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        base = _COPY.sub("", node.name)
        if isinstance(node.target, Transition):
            if base in paths and node.target.target != "partial":
                is_part = node.target.target == "part" and not node.target.after.is_whole
                found[paths[base]].append(_sums(value, is_part=is_part))
            return
        placement = strategies[node.name].output if node.name in strategies else None
        paths[node.name] = node.path
        found[node.path] = [] if placement == PARTIAL else [_sums(value, is_part=isinstance(placement, Part))]

    with engine.computing("rerun", idle=not chunks):
        batches = yield from engine.drawn.all_drawn(
            replica.scope.moments(chunks), engine.programs.losses.loss
        )
        for batch, chunk in zip(batches, chunks, strict=True):
            yield from engine.programs.ready(batch)
            engine.microbatches.look(batch, _draws_of(replica, chunk), visit)
    return found


def _draws_of(replica: Replica, chunk: Chunk) -> Any:
    return lambda stage, microbatch, rerun: replica.scope.draws(chunk)


def _sums(value: Tensor, *, is_part: bool) -> Value:
    exact = value.detach().double()
    return is_part, float(exact.sum()), float(exact.square().sum()), value.numel(), ramp_of(exact)


def _together(of_ranks: Sequence[Sequence[Value]]) -> list[tuple[Value, ...]]:
    """Values of all ranks that have one, in order."""
    return list(zip(*of_ranks, strict=False)) if of_ranks else []


def _added(name: str, call: int, values: Sequence[Value]) -> ModuleOutput:
    _, totals, squares, counts, ramps = zip(*values, strict=True)
    return ModuleOutput(
        name=name, call=call, total=sum(totals), square=sum(squares), count=sum(counts), ramp=ramps[0] if len(ramps) == 1 else None
    )  # fmt: skip

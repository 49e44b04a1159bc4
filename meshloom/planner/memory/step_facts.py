"""What a step of one microbatch takes of memory before anything is divided, as plain numbers.

They are found on fake tensors (`fake_step.py`); `rank_memory.py` makes a rank's peak of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshloom.core.job import NamedParameters
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.planner.memory.fake_step import FakeStep, NeedsValuesError
from meshloom.program.ir.program import Program
from meshloom.program.recompute.segments import is_view


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Bytes of a whole model and of a step of some microbatches.

    trained: of trainable parameters. largest: of the largest parameter. batch: of one microbatch.
    chunks: most bytes of activations, gradients and temporaries at one time in forwards and backwards.
    update: an optimizer's scratch; master_gradients: gradients of masters besides. evaluation: most bytes of a forward that saves nothing.
    optimizer_factor: bytes of state per byte of trainable parameters.
    comparison: what the rank that captures takes to compare the program with eager, the stand-ins of its parameters among it; 0: nothing is compared.
    """

    parameters: int
    trained: int
    largest: int
    buffers: int
    constants: int
    batch: int
    chunks: int
    update: int
    evaluation: int
    optimizer_factor: float
    master_gradients: int = 0
    comparison: int = 0


def facts_of(
    program: Program,
    optimizer: Callable[[NamedParameters], Any],
    *,
    microbatches: int,
    bucketed: bool,
) -> StepFacts:
    """Of `program`, that of one microbatch. bucketed: gradients are copied into buckets
    that are always there."""
    settings: dict[str, Any] = {"microbatches": min(microbatches, 2), "bucketed": bucketed}
    try:
        step = FakeStep(program, optimizer, **settings)
        factor = step.optimizer_bytes / sum(step.trainable_bytes) if step.trainable_bytes else 0.0
    except NeedsValuesError:
        step, factor = FakeStep(program, None, **settings), OPTIMIZER_FACTOR
    there = 0 if bucketed else step.gradient_bytes
    metas = [each.meta for each in program.parameters.values()]
    return StepFacts(
        parameters=step.parameter_bytes,
        trained=sum(step.trainable_bytes),
        largest=max((each.num_bytes for each in metas), default=0),
        buffers=step.buffer_bytes,
        constants=step.constant_bytes,
        batch=sum(each.meta.num_bytes for each in program.inputs),
        chunks=max(step.peaks["forward"], step.peaks["backward"]),
        update=max(0, step.peaks.get("update", 0) - there - step.master_gradients),
        evaluation=forward_bytes(program),
        optimizer_factor=factor,
        master_gradients=step.master_gradients,
    )


def forward_bytes(program: Program) -> int:
    """Most bytes of results at one time in a forward that saves nothing: every value is freed after its last use."""
    owner: dict[str, str] = {}
    last: dict[str, int] = {}
    for number, node in enumerate(program.nodes):
        operands = [ref.name for ref in node.operands()]
        owner[node.name] = (
            owner.get(operands[0], operands[0]) if operands and is_view(node.target) else node.name
        )
        for name in (node.name, *operands):
            last[owner.get(name, name)] = number
    ends: dict[int, list[str]] = {}
    for name, number in last.items():
        ends.setdefault(number, []).append(name)
    sizes: dict[str, int] = {}
    alive = most = 0
    for number, node in enumerate(program.nodes):
        if owner[node.name] == node.name:
            sizes[node.name] = sum(each.num_bytes for each in node.outputs)
            alive += sizes[node.name]
            most = max(most, alive)
        alive -= sum(sizes.pop(name, 0) for name in ends.get(number, ()))
    return most

"""Memory of the comparison with eager that a program passes before its first use, on the rank that captures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.core.job import Job
from meshloom.planner.memory.fake_step import FakeStep
from meshloom.program.ir.program import Program
from meshloom.program.sizes.any_size import smaller


def compared_program(program: Program, job: Job, batch: Any, read: Callable[[Any], Program]) -> Program:
    """What is compared in place of `program`, that of `batch`: itself, or itself at smaller sizes. read: as for `smaller`."""
    found = smaller(program, job, batch, read)
    return found.program if found else program


def comparison_bytes(compared: Program) -> int:
    """Most bytes of activations, temporaries and one gradient at a time, with the batch and buffers, but without
    parameters."""
    step = FakeStep(compared, None, bucketed=True)
    batch = sum(each.meta.num_bytes for each in compared.inputs)
    return max(step.peaks.values(), default=0) + step.buffer_bytes + step.constant_bytes + batch

"""Describes a job's model by shapes alone: its blocks, their costs, and the memory of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from meshloom.core.job import Job
from meshloom.core.random import preserved_draws
from meshloom.machine.machine import Machine
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.parameters.file_weights import match_weights
from meshloom.parameters.unfilled_model import build_unfilled
from meshloom.planner.blocks import Block, blocks_of
from meshloom.planner.memory.fake_step import NeedsValuesError
from meshloom.planner.memory.memory import Memory, predict_memory
from meshloom.planner.readings import Readings
from meshloom.program.cost.opaque_shares import opaque_notes
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.opaque.operator import is_opaque


@dataclass(frozen=True, kw_only=True)
class Description:
    """One step of a job on one device, with its batch as one chunk.

    whole: the model as a block. unused: parameters that the loss does not use. unpriced: operators of other
    libraries without a formula for their FLOPs, which count as 0. opaque: sentences on what runs as written. memory: of a step; None where the optimizer
    cannot be run without values; `no_memory` then says so in one sentence. machine: for which seconds are
    predicted; None: none was measured.
    """

    program: Program
    whole: Block
    batch_size: int
    unused: tuple[str, ...]
    unpriced: tuple[str, ...]
    opaque: tuple[str, ...]
    tied: Sequence[tuple[str, ...]]
    memory: Memory | None
    no_memory: str
    machine: Machine | None

    @property
    def optimizer_factor(self) -> float:
        """Bytes of optimizer state per byte of parameters."""
        return self.memory.optimizer_factor if self.memory else OPTIMIZER_FACTOR


def describe(
    readings: Readings, *, batch_size: int | None = None, machine: Machine | None = None
) -> Description:
    """The description of the job's first batch on one device. Raises errors of `Readings.of`.

    batch_size: samples of the batch; default: the job's.
    """
    job = readings.job
    reading = readings.of(batch_size or job.batch_size)
    program = reading.program
    with readings.timings.of("memory of a step"):
        memory, no_memory = _memory_of(program, readings)
    with readings.timings.of("blocks"):
        whole = blocks_of(program, reading.costs, reading.kinds, machine)
    used = {ref.name for node in program.nodes for ref in node.operands()}
    without_flops = [node for node in program.nodes if not reading.costs[node.name].flops]
    unpriced = [node.operator for node in without_flops if _is_foreign(node) and not is_opaque(node)]
    return Description(
        program=program,
        whole=whole,
        batch_size=batch_size or job.batch_size,
        unused=tuple(name for name, each in program.parameters.items() if each.value not in used),
        unpriced=tuple(dict.fromkeys(unpriced)),
        opaque=tuple(opaque_notes(program, reading.costs)),
        tied=[(name, *each.aliases) for name, each in program.parameters.items() if each.aliases],
        memory=memory,
        no_memory=no_memory,
        machine=machine,
    )


def check_weights(job: Job) -> Sequence[str]:
    """What a job's files give, as notes; none if it has no files. Reads their headers alone. Raises `WeightsError`
    where they do not fit the model, with all differences."""
    if job.weights is None:
        return ()
    with preserved_draws():
        model = build_unfilled(job, torch.device("cpu"), None)[0]
    weights = match_weights(job, model)
    return weights.notes if weights else ()


def _memory_of(program: Program, readings: Readings) -> tuple[Memory | None, str]:
    job, stored, parts = readings.job, readings.stored, readings.optimizer_key
    predict = partial(predict_memory, program, job.optimizer, copies=job.checkpoint == "background")
    try:
        if stored is None or parts is None:
            return predict(), ""
        return stored.value("memory", program, {**parts, "checkpoint": job.checkpoint}, Memory, predict), ""
    except NeedsValuesError as error:
        return None, str(error)


def _is_foreign(node: Node) -> bool:
    """Whether the operator belongs to another library."""
    namespace = getattr(node.target, "namespace", "aten")
    return namespace not in ("aten", "prims", "_operator")

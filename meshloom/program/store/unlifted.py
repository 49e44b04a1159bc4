"""The program of a loss in the job's own precision, beside the one captured in another for verification.

Sharding and stage boundaries depend on sizes of values and costs of operators, and both double in float64.
Verification must use those of training, so they are chosen for this program, captured by shapes, and applied
to the other one. Export keeps casts that change nothing, so both have the same operators, also where parts of
a model have a precision of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshloom.core.job import Job
from meshloom.program.capture.attempted import attempted
from meshloom.program.capture.capture import capture
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.ir.batch_values import takes_numbers
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.store.program_cache import ProgramCache


def unlifted(
    program: Program,
    job: Job,
    batch: Any,
    dtypes: Mapping[str, torch.dtype],
    stored: ProgramCache | None = None,
) -> Program | None:
    """The program of `job.loss` for batches like `batch`, in the job's own precision. program: the one
    captured in the precision of the verification; batch: in either precision.

    dtypes: of the tensors of a batch in the job's own precision, by name. None: the program in that precision
    has other operators, because the model depends on dtypes; then the choices of training cannot be applied.
    stored: programs by shapes of earlier runs.
    """
    leaves = leaves_of(batch)
    floating = Counter(each for each in dtypes.values() if each.is_floating_point)
    usual = floating.most_common(1)[0][0] if floating else torch.get_default_dtype()
    tensors = (
        leaf.to(dtypes.get(name, usual)) if leaf.is_floating_point() else leaf
        for name, leaf in leaves.tensors.items()
    )
    own = leaves.rebuild(list(tensors))

    def kept(model: nn.Module, shapes: Leaves, read: Callable[[], Program]) -> Program:
        if stored is None:
            return read()
        return stored.by_shapes(job, model, shapes, read, training=program.training, device=program.device)

    found = None
    if not program.opaque:  # None where the constructor needs values, for example
        found, _ = attempted(
            lambda: capture_shapes(job, own, training=program.training, device=program.device, kept=kept)
        )
    wanted = _facts(program)
    # a capture by shapes has no numbers of the batch as inputs
    if found is not None and _facts(found) == wanted:
        return found
    numbers = takes_numbers(program.others)
    found = capture(job, (own, own), training=program.training, numbers=numbers, opaque=program.opaque)
    return found if _facts(found) == wanted else None


def _facts(program: Program) -> list[Any]:
    """Everything but precisions."""
    state = [
        (each.value, each.meta.shape)
        for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    ]
    nodes: list[Any] = []
    for node in program.nodes:
        outputs = [(each.shape, each.requires_grad) for each in node.outputs]
        nodes.append((node.name, node.target, [ref.name for ref in node.operands()], outputs))
    return [state, [(name, tuple(each.shape)) for name, each in program.constants.items()], nodes]

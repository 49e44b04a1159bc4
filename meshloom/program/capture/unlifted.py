"""A loss as it is read in the job's own precision, beside the program of it that was lifted to another one
for verification.

Divisions and cuts are chosen by what values weigh and operators take, and both double in float64. What is
verified is to be what is trained, so they are chosen for this program, of shapes alone, and hold for the
lifted one: export keeps casts that change nothing, so the two have the same operators, one for one, also
where parts of a model have a precision of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from meshloom.core.job import Job
from meshloom.program.capture.capture import capture
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.ir.batch_values import takes_numbers
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program


def unlifted(program: Program, job: Job, batch: Any, dtypes: Mapping[str, torch.dtype]) -> Program | None:
    """The program of `job.loss` for batches like `batch` in the job's own precision. program: the same
    lifted; batch: in either precision.

    dtypes: of the tensors of a batch in the job's own precision, by name. None: there is no program in it
    with the same operators, as for a model that asks for dtypes and does something else in each. Then it
    cannot be said what is chosen for it in training.
    """
    leaves = leaves_of(batch)
    ((usual, _),) = Counter(each for each in dtypes.values() if each.is_floating_point).most_common(1) or [
        (torch.get_default_dtype(), 0)
    ]
    own = leaves.rebuild(
        [
            leaf.to(dtypes.get(name, usual)) if leaf.is_floating_point() else leaf
            for name, leaf in leaves.tensors.items()
        ]
    )
    try:
        found = capture_shapes(job, own, training=program.training, device=program.device)
    except Exception:
        # a constructor that needs values, or whatever else only values show: then it is read with them
        found = None
    # shapes alone do not make inputs of the numbers in a batch
    if found is None or not _alike(found, program):
        found = capture(job, (own, own), training=program.training, numbers=takes_numbers(program.others))
    return found if _alike(found, program) else None


def _alike(one: Program, other: Program) -> bool:
    return _facts(one) == _facts(other)


def _facts(program: Program) -> list[Any]:
    """All but precisions."""
    state = [
        (each.value, each.meta.shape)
        for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    ]
    nodes = [
        (
            node.name,
            node.target,
            [ref.name for ref in node.operands()],
            [(each.shape, each.requires_grad) for each in node.outputs],
        )
        for node in program.nodes
    ]
    return [state, [(name, tuple(each.shape)) for name, each in program.constants.items()], nodes]

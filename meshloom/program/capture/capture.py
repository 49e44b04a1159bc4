"""Captures a job's loss as a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job, LossFunction
from meshloom.program.capture.causal_masks import with_causal_attention
from meshloom.program.capture.leaf_rule import leaves_of_job
from meshloom.program.capture.opaque_runs import recorded_calls
from meshloom.program.ir.batch_values import read_values
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.opaque.bound import with_needs
from meshloom.program.opaque.call import UnrecordedLeafError
from meshloom.program.opaque.functions import MARKED
from meshloom.program.opaque.stand_ins import Recorded
from meshloom.program.trace.block_calls import Shortcuts
from meshloom.program.trace.build import build
from meshloom.program.trace.precision import build_model, in_precision
from meshloom.program.trace.repeated_export import (
    capturing,
    check_tensors,
    device_of,
    export_once,
    one_thread,
    with_shortcuts,
)


def capture(
    job: Job,
    batches: Sequence[Any],
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    numbers: bool = True,
    opaque: Mapping[str, str] | None = None,
) -> Program:
    """The program of `job.loss` for batches of the shapes of these. Raises `CaptureError` if none exists.

    The loss is exported with the first; the others are for leaves, whose calls are recorded with all of them.
    dtype: convert the model and the batches to it first.
    numbers: whether numbers in a batch may be inputs; else the program is specialized to them.
    opaque: as in `capture_module`; default: the leaves that the job names.
    """
    with one_thread():
        model = build_model(job, dtype, training=training, beside=batches[0])
        parts = leaves_of_job(job, model) if opaque is None else opaque
        return capture_module(model, job.loss, batches, dtype=dtype, numbers=numbers, opaque=parts)


def capture_module(
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    numbers: bool = True,
    opaque: Mapping[str, str] | None = None,
) -> Program:
    """`capture` of an existing module, which is unchanged afterwards, its tensors and plain attributes
    included.

    opaque: modules that become operators, and why; those that are not called are left out. Leaf functions are besides.
    """
    batches = [in_precision(each, dtype) for each in batches]
    given = [leaves_of(each) for each in batches]
    _check_shapes(given)

    def read(leaves: Leaves, shortcuts: Shortcuts) -> Program:
        exported = export_once(model, loss, leaves, shortcuts, recorded)
        parts = {path: asked.get(path, MARKED) for path in recorded}
        return build(exported, model, leaves.tensors, device_of(model, leaves), dtype, parts)

    def read_shortly(leaves: Leaves) -> Program:
        return with_shortcuts(partial(read, leaves))

    with capturing(dtype):
        asked = opaque or {}
        recorded: Recorded = recorded_calls(model, loss, batches, asked) if asked else {}
        try:
            program, others = read_values(given[0], read_shortly, numbers=numbers)
        except UnrecordedLeafError:
            recorded = recorded_calls(model, loss, batches, asked)
            program, others = read_values(given[0], read_shortly, numbers=numbers)
    return with_needs(replace(with_causal_attention(program), others=others))


def _check_shapes(batches: Sequence[Leaves]) -> None:
    first = batches[0]
    check_tensors(first)
    for second in batches[1:]:
        if list(first.values) != list(second.values):
            raise CaptureError(
                "The batches to capture the loss with must have the same structure, and one holds "
                f"{', '.join(first.values)} and the other {', '.join(second.values)}."
            )
        for name in {**first.tensors, **second.tensors}:
            one, other = (_shape(each.tensors.get(name)) for each in (first, second))
            if one != other:
                raise CaptureError(
                    f"The batches to capture the loss with must have the same structure, and {name} is {one} in one and {other} in the other."
                )


def _shape(leaf: Tensor | None) -> str:
    return "missing" if leaf is None else f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

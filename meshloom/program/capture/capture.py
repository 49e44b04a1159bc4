"""Captures a job's loss as a program, and refuses what a program would freeze."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job, LossFunction
from meshloom.program.capture.causal_masks import with_causal_attention
from meshloom.program.capture.leaf_rule import leaves_of_job
from meshloom.program.capture.opaque_runs import recorded_calls
from meshloom.program.ir.batch_values import read_values
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import strides_of
from meshloom.program.opaque.bound import with_needs
from meshloom.program.opaque.call import UnrecordedLeafError
from meshloom.program.opaque.functions import MARKED
from meshloom.program.opaque.stand_ins import Recorded
from meshloom.program.trace.block_calls import Shortcuts
from meshloom.program.trace.build import build
from meshloom.program.trace.export import Exported, context_of
from meshloom.program.trace.frozen import check_equal, equal_bits
from meshloom.program.trace.precision import build_model, in_precision
from meshloom.program.trace.repeated_export import (
    capturing,
    check_tensors,
    device_of,
    export_once,
    export_twice,
    one_thread,
    with_shortcuts,
)


def capture(
    job: Job,
    batches: tuple[Any, Any],
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    numbers: bool = True,
    shortcuts: Shortcuts | None = None,
    opaque: Mapping[str, str] | None = None,
) -> Program:
    """The program of `job.loss` for batches of the shapes of these two. Raises `CaptureError` if none exists.

    The loss is exported twice, with different data and seeds; differences would be frozen, so they are
    refused.
    dtype: convert the model and the batches to it first. shortcuts: those to take; None: as many as possible.
    numbers: whether numbers in a batch may be inputs; else the program is specialized to them.
    opaque: as in `capture_module`; default: the leaves that the job names.
    """
    with one_thread():
        model = build_model(job, dtype, training=training, beside=batches[0])
        parts = leaves_of_job(job, model) if opaque is None else opaque
        given: Any = {"numbers": numbers, "shortcuts": shortcuts, "opaque": parts}
        return capture_module(model, job.loss, batches, dtype=dtype, **given)


def capture_module(
    model: nn.Module,
    loss: LossFunction,
    batches: tuple[Any, Any],
    *,
    dtype: torch.dtype | None = None,
    numbers: bool = True,
    shortcuts: Shortcuts | None = None,
    once: bool = False,
    opaque: Mapping[str, str] | None = None,
) -> Program:
    """`capture` of an existing module, which is unchanged afterwards, its tensors and plain attributes
    included.

    once: export it with the first batch alone, where the loss is known to freeze nothing.
    opaque: modules that become operators, and why; those that are not called are left out. Leaf functions are besides.
    """
    batches = in_precision(batches[0], dtype), in_precision(batches[1], dtype)
    given = leaves_of(batches[0]), leaves_of(batches[1])
    _check_shapes(*given)

    def read(leaves: Sequence[Leaves], shortcuts: Shortcuts) -> Program:
        def built(exported: Exported, number: int) -> Program:
            device = device_of(model, leaves[0])
            parts = {path: asked.get(path, MARKED) for path in recorded}
            return build(exported, model, leaves[number].tensors, device, dtype, parts)

        if once:
            return built(export_once(model, loss, leaves[0], shortcuts, recorded), 0)
        first, second = export_twice(model, loss, (leaves[0], leaves[1]), shortcuts, recorded)
        same = _same(first, second) and all(
            one.stride() == leaves[1].tensors[name].stride() for name, one in leaves[0].tensors.items()
        )
        program = built(first, 0)
        if not same:
            check_equal(program, built(second, 1))
        return program

    def read_shortly(leaves: Sequence[Leaves]) -> Program:
        return read(leaves, shortcuts) if shortcuts else with_shortcuts(partial(read, leaves))

    with capturing(dtype):
        asked, run = opaque or {}, batches[:1] if once else batches
        recorded: Recorded = recorded_calls(model, loss, run, asked) if asked else {}
        try:
            program, others = read_values(given, read_shortly, numbers=numbers)
        except UnrecordedLeafError:
            recorded = recorded_calls(model, loss, run, asked)
            program, others = read_values(given, read_shortly, numbers=numbers)
    return with_needs(replace(with_causal_attention(program), others=others))


def _same(first: Exported, second: Exported) -> bool:
    """Whether two exports are equal, so that their programs are, too."""
    one, other = ((each.inputs, each.parameters, each.buffers, each.out_spec) for each in (first, second))
    if one != other or list(first.constants) != list(second.constants):
        return False
    if not all(
        one.dtype == other.dtype and strides_of(one) == strides_of(other) and equal_bits(one, other)
        for one, other in zip(first.constants.values(), second.constants.values(), strict=True)
    ):
        return False
    return len(first.graph.nodes) == len(second.graph.nodes) and all(
        _fact(one) == _fact(other) for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True)
    )


def _fact(node: fx.Node) -> tuple[str, ...]:
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs), str(context_of(node))


def _check_shapes(first: Leaves, second: Leaves) -> None:
    check_tensors(first)
    for name in {**first.tensors, **second.tensors}:
        one, other = (_shape(each.tensors.get(name)) for each in (first, second))
        if one != other:
            raise CaptureError(
                f"The two batches to capture the loss with must have the same structure, and {name} is {one} in one and {other} in the other."
            )


def _shape(leaf: Tensor | None) -> str:
    return "missing" if leaf is None else f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

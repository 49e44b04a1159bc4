"""Runs a program on a batch: compiled once for a device and a precision, with its recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from meshloom.comm.group import Group
from meshloom.core.errors import CaptureError
from meshloom.program.ir.batch_values import fits, tensor_of
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.ir.step_input import STEP
from meshloom.program.recompute.saved_frame import Elsewhere
from meshloom.program.run.runner import Runner, compile_program
from meshloom.program.run.segment_runner import RecomputingRunner


def run_program(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Any,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    visit: Callable[[Node, Any], None] | None = None,
    group: Group | None = None,
) -> Any:
    """The loss function's result for `batch`. Updates buffers as the module would.

    parameters, buffers: by the user's names, on `device`.
    device: where to compute; default: where it was captured.
    dtype: compute all floating-point operators in this dtype: constants, inner casts and autocast regions are
        converted to it, and `parameters` and `buffers` must have it.
    visit: called with every node and its value; slower.
    group: the ranks over which it is sharded, if it is one rank's program.
    Raises `CaptureError` for a program captured by shapes, and for a batch of other shapes or values.
    """
    if program.by_shapes:
        raise CaptureError(
            f"This program of {len(program.nodes)} operators was captured by shapes, so it cannot be run. Capture it from batches: capture(job, batches)."
        )
    leaves = leaves_of(batch)
    _check_batch(program, leaves)
    flat = [tensor_of(leaves, each, dtype) for each in program.inputs]
    runner = _runner(program, device, dtype, visiting=visit is not None)
    return tree_unflatten(runner.run(parameters, buffers, flat, visit, group), program.out_spec)


def run_flat(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    *,
    visit: Callable[[Node, Any], None] | None = None,
    group: Group | None = None,
    elsewhere: Elsewhere | None = None,
) -> list[Any]:
    """`run_program` on the program's own device and dtype, from input tensors to flat outputs, unchecked.

    elsewhere: has the values of the parameters, if this rank keeps only slices of them.
    """
    runner = _runner(program, None, None, visiting=visit is not None)
    return runner.run(parameters, buffers, inputs, visit, group, elsewhere)


def _runner(
    program: Program, device: torch.device | str | None, dtype: torch.dtype | None, *, visiting: bool
) -> Runner | RecomputingRunner:
    where = torch.device(device) if device is not None else program.device
    known = program.compiled.get((where, dtype, visiting))
    if known is not None:
        return known
    if program.kept is not None and not visiting:
        runner = RecomputingRunner(program, program.kept, where, dtype)
    else:
        runner = compile_program(program, where, dtype, visiting=visiting, shared=program.shared)
    return program.compiled.setdefault((where, dtype, visiting), runner)


def _check_batch(program: Program, leaves: Leaves) -> None:
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.tensors.items()}
    shapes |= dict.fromkeys([*leaves.values, STEP], ())
    for each in program.inputs:
        shape = shapes.get(each.name)
        if shape != each.meta.shape:
            given = f"has shape {list(shape)}" if shape is not None else "is missing"
            raise CaptureError(
                f"{each.name} of the batch {given}, and the program is for {list(each.meta.shape)}. Capture a program for batches of this shape."
            )
    if not fits(program.others, leaves.values):
        wanted = ", ".join(f"{name} is {each}" for name, each in program.others.items() if each)
        raise CaptureError(
            f"The program is for batches in which {wanted or 'there is nothing besides tensors'}. Capture one for this batch."
        )

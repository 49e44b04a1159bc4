"""Reads a job's loss as a program, and refuses what a program would freeze."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshloom.errors import CaptureError
from meshloom.graph.build import build
from meshloom.graph.frozen import check_equal
from meshloom.graph.leaves import Leaves, leaves_of
from meshloom.graph.precision import build_model, in_precision
from meshloom.graph.program import Program
from meshloom.graph.reading import check_tensors, device_of, read_twice, reading
from meshloom.job import Job, LossFunction


def capture(job: Job, batches: tuple[Any, Any], *, training: bool = True, dtype: torch.dtype | None = None) -> Program:
    """The program of `job.loss` for batches of the shapes of these two. Raises `CaptureError` if there is none.

    The loss is read twice, under different data and seeds; what differs would be frozen in the program, so it is refused.
    dtype: convert the model and the batches to it first.
    """
    return capture_module(build_model(job, dtype, training=training), job.loss, batches, dtype=dtype)


def capture_module(model: nn.Module, loss: LossFunction, batches: tuple[Any, Any], *, dtype: torch.dtype | None = None) -> Program:
    """The same for a module that is there already. Its tensors stay as they are; plain attributes that its forward changes do not."""
    batches = in_precision(batches[0], dtype), in_precision(batches[1], dtype)
    leaves = leaves_of(batches[0]), leaves_of(batches[1])
    _check_shapes(*leaves)
    with reading(dtype):
        exported = read_twice(model, loss, leaves)
        device = device_of(model, leaves[0])
        programs = [build(each, model, leaf.tensors, device, dtype) for each, leaf in zip(exported, leaves, strict=True)]
    check_equal(*programs)
    return programs[0]


def _check_shapes(first: Leaves, second: Leaves) -> None:
    check_tensors(first)
    shapes = [{name: (tuple(leaf.shape), leaf.dtype) for name, leaf in each.tensors.items()} for each in (first, second)]
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        one, other = shapes[0].get(name), shapes[1].get(name)
        if one != other:
            raise CaptureError(
                f"The two batches to read the loss with must be alike, and {name} is {_shown(one)} in one and {_shown(other)} in the other."
            )


def _shown(shape: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return f"{str(shape[1]).removeprefix('torch.')}{list(shape[0])}" if shape else "missing"

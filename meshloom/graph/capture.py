"""Reads a job's loss as a program, and refuses what a program would freeze."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshloom.errors import CaptureError
from meshloom.graph.attributes import Changed
from meshloom.graph.build import build
from meshloom.graph.export import Exported, export
from meshloom.graph.frozen import check_draws, check_equal, line_that_changes
from meshloom.graph.leaves import Leaves, leaves_of
from meshloom.graph.lines import WAY_OUT
from meshloom.graph.precision import build_model, default_precision, in_precision
from meshloom.graph.program import Program
from meshloom.job import Job, LossFunction
from meshloom.random import derive, preserved_draws, seed_everything

_ONE_AT_A_TIME = threading.Lock()  # torch.export keeps what it is doing in globals, and so do Python's generators


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
    with _ONE_AT_A_TIME, preserved_draws(), default_precision(dtype):
        first, second = _export_twice(model, loss, leaves)
        device = _device(model, leaves[0])
        programs = [build(each, model, leaf.tensors, device, dtype) for each, leaf in zip((first, second), leaves, strict=True)]
    check_equal(*programs)
    return programs[0]


def _export_twice(model: nn.Module, loss: LossFunction, leaves: tuple[Leaves, Leaves]) -> tuple[Exported, Exported]:
    """Both readings, with plain attributes as a forward leaves them to the next one: what the first alone sets up is no harm."""

    def read(number: int) -> Exported:
        return export(model, _loss_of(loss, leaves[number]), list(leaves[number].tensors.values()))

    def read_seeded(number: int) -> Exported:
        seed_everything(derive("capture", number))
        check = check_draws()
        exported = read(number)
        check(lambda: read(number))
        return exported

    first = read_seeded(0)
    try:
        for path, name, _, after in first.left:
            vars(model.get_submodule(path))[name] = after
        second = read_seeded(1)
        steady = read_seeded(0) if first.left and not second.changed else first
    finally:
        for path, name, before, _ in first.left:
            vars(model.get_submodule(path))[name] = before
    for changed in [*(each for each in first.changed if each[1] == "training"), *second.changed]:
        raise _refuse_attribute(model, changed, lambda: read(1))
    return steady, second


def _loss_of(loss: LossFunction, leaves: Leaves) -> Any:
    return lambda model, tensors: loss(model, leaves.rebuild(tensors))


def _check_shapes(first: Leaves, second: Leaves) -> None:
    if not first.tensors:
        raise CaptureError(
            f"The batch holds no tensors (its parts are mappings, lists, tuples, dataclasses or neither), so there is nothing to read. {WAY_OUT}"
        )
    shapes = [{name: (tuple(leaf.shape), leaf.dtype) for name, leaf in each.tensors.items()} for each in (first, second)]
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        one, other = shapes[0].get(name), shapes[1].get(name)
        if one != other:
            raise CaptureError(
                f"The two batches to read the loss with must be alike, and {name} is {_shown(one)} in one and {_shown(other)} in the other."
            )


def _shown(shape: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return f"{str(shape[1]).removeprefix('torch.')}{list(shape[0])}" if shape else "missing"


def _refuse_attribute(model: nn.Module, changed: Changed, again: Callable[[], Any]) -> CaptureError:
    path, attribute, before, after = changed
    module = model.get_submodule(path)
    line = line_that_changes(again, lambda: repr(vars(module).get(attribute)))
    if attribute == "training":
        return CaptureError(
            f"The forward switches {path or 'the model'} between training and evaluation at {line}, and a program has one mode. "
            f"Switch it where the model is built. {WAY_OUT}"
        )
    name = f"{path}.{attribute}" if path else attribute
    return CaptureError(
        f"The forward changes the attribute {name} from {before} to {after} at {line}, which a program would not. "
        f"Make it a buffer (register_buffer) that is updated with torch. {WAY_OUT}"
    )


def _device(model: nn.Module, leaves: Leaves) -> torch.device:
    found: dict[torch.device, None] = {}
    for tensor in (*model.parameters(), *model.buffers(), *leaves.tensors.values()):
        found.setdefault(tensor.device)
    if len(found) != 1:
        raise CaptureError(f"The model and the batch lie on {', '.join(map(str, found))}. Put all of it on one device. {WAY_OUT}")
    return next(iter(found))

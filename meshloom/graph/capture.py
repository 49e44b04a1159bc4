"""Reads a job's loss as a program, and refuses what a program would freeze."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshloom.errors import CaptureError
from meshloom.graph.attributes import Changed, changed_attributes, plain_attributes
from meshloom.graph.build import build
from meshloom.graph.export import WAY_OUT, Exported, export
from meshloom.graph.frozen import check_draws, check_equal, line_that_changes
from meshloom.graph.leaves import Leaves, leaves_of
from meshloom.graph.precision import build_model, default_precision, in_precision
from meshloom.graph.program import Program
from meshloom.job import Job, LossFunction
from meshloom.random import derive, preserved_draws, seed_everything


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
    started = plain_attributes(model)
    with preserved_draws(), default_precision(dtype):
        exported: list[Exported] = []
        for number, each in enumerate(leaves):
            seed_everything(derive("capture", number))
            check = check_draws()
            exported.append(export(model, _loss_of(loss, each), list(each.tensors.values())))
            check(lambda: export(model, _loss_of(loss, each), list(each.tensors.values())))  # noqa: B023  # called at once
        _check_attributes(model, loss, leaves, started, exported[1].changed)
        device = _device(model, leaves[0])
        first, second = (build(each, model, leaf.tensors, device, dtype) for each, leaf in zip(exported, leaves, strict=True))
    check_equal(first, second)
    return first


def _loss_of(loss: LossFunction, leaves: Leaves) -> Any:
    return lambda model, tensors: loss(model, leaves.rebuild(tensors))


def _check_shapes(first: Leaves, second: Leaves) -> None:
    if not first.tensors:
        raise CaptureError(f"The batch holds no tensors (its parts are mappings, lists, tuples, dataclasses or neither), so there is nothing to read. {WAY_OUT}")
    shapes = [{name: (tuple(leaf.shape), leaf.dtype) for name, leaf in each.tensors.items()} for each in (first, second)]
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        one, other = shapes[0].get(name), shapes[1].get(name)
        if one != other:
            raise CaptureError(f"The two batches to read the loss with must be alike, and {name} is {_shown(one)} in one and {_shown(other)} in the other.")


def _shown(shape: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return f"{str(shape[1]).removeprefix('torch.')}{list(shape[0])}" if shape else "missing"


def _check_attributes(model: nn.Module, loss: LossFunction, leaves: Sequence[Leaves], started: Any, changed: list[Changed]) -> None:
    """Refuse attributes that every forward changes, and modes that any changes; what the first alone sets up is no harm."""
    switched = [each for each in changed_attributes(started, plain_attributes(model)) if each[1] == "training"]
    for module, attribute, before, after in [*switched, *changed]:
        value = {"training": before == "True"}.get(attribute)
        if value is not None:
            model.get_submodule(module).training = value
        place = model.get_submodule(module)
        line = line_that_changes(
            lambda: export(model, _loss_of(loss, leaves[1]), list(leaves[1].tensors.values())),
            lambda: repr(vars(place).get(attribute)),  # noqa: B023  # called in this turn
        )
        name = f"{module}.{attribute}" if module else attribute
        what = "switches between training and evaluation" if attribute == "training" else f"changes the attribute {name} from {before} to {after}"
        where = f" of {module or 'the model'}" if attribute == "training" else ""
        raise CaptureError(
            f"The forward {what}{where} at {line}, which a program would do once and never again. "
            f"{'Switch it where the model is built' if attribute == 'training' else 'Make it a buffer (register_buffer) that is updated with torch'}. {WAY_OUT}"
        )


def _device(model: nn.Module, leaves: Leaves) -> torch.device:
    found: dict[torch.device, None] = {}
    for tensor in (*model.parameters(), *model.buffers(), *leaves.tensors.values()):
        found.setdefault(tensor.device)
    if len(found) != 1:
        raise CaptureError(f"The model and the batch lie on {', '.join(map(str, found))}. Put all of it on one device. {WAY_OUT}")
    return next(iter(found))



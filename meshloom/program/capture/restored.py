"""A model as it was before it ran, and batches that a run may write to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshloom.program.ir.leaves import copy_of, leaves_of
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.program.trace.attributes import attributes_restored, plain_values, put_attribute


@contextmanager
def restored(model: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Clears gradients, and restores gradients, buffers, parameters that count as buffers, hooks of parameters, and plain attributes on exit.

    written: names of trained parameters, which have copies of their values meanwhile."""
    hooks = [set(each) for each in _hooks(model)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, dict(vars(module)["_buffers"]))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # whose buffers are never replaced
    ]
    values = {id(buffer): (buffer, buffer.detach().clone()) for _, buffer in named_buffers(model)}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with own_memory(map(model.get_parameter, written)), attributes_put_back(model):
            yield
    finally:
        for module, own in buffers:
            vars(module)["_buffers"].update(own)
        with torch.no_grad():
            for buffer, value in values.values():
                if buffer.shape != value.shape:  # resized in place
                    buffer.resize_(value.shape)
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for now, known in zip(_hooks(model), hooks, strict=True):
            for number in now.keys() - known:
                del now[number]


@contextmanager
def own_memory(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """These have copies of their values meanwhile."""
    memory = [(each, each.data) for each in parameters]
    for parameter, value in memory:
        parameter.data = value.clone()
    try:
        yield
    finally:
        for parameter, value in memory:
            parameter.data = value


def _hooks(model: nn.Module) -> list[dict[int, Any]]:
    """Torch's registers of hooks of parameters, empty where there is none yet."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [getattr(each, name, None) or {} for each in model.parameters() for name in names]


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Restores plain attributes, and those that hold tensors, on exit; whether modules train, too: a loss that fails half-way
    may have called `eval()`."""
    plain = plain_values(model)
    modes = [(module, module.training) for module in model.modules()]
    registered = [
        (module, set(vars(module)["_buffers"]))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    tensors = [
        (each, each._version, each.detach().clone())
        for module in model.modules()
        for each in vars(module).values()
        if isinstance(each, torch.Tensor) and not each.is_inference()
    ]
    try:
        with attributes_restored(model):
            yield
    finally:
        for tensor, version, value in tensors:
            if tensor._version != version:
                tensor.data.copy_(value)
        for module, mode in modes:
            if module.training != mode:
                module.training = mode
        for module, names in registered:
            _drop_others(module, names)
        for (path, name), value in plain.items():
            put_attribute(model, path, name, value)


def _drop_others(module: nn.Module, names: Collection[str]) -> None:
    """Removes the buffers that a forward has registered since a module had these, as on ranks without that forward."""
    now = vars(module)["_buffers"]
    for name in [name for name in now if name not in names]:
        del now[name]
        vars(module)["_non_persistent_buffers_set"].discard(name)


def cloned(batch: Any) -> Any:
    """A batch of copies."""
    leaves = leaves_of(batch)
    return leaves.rebuild([copy_of(leaf) for leaf in leaves.tensors.values()])

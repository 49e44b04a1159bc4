"""Moves a batch, nested in any way, to a device, and a model to a precision."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def to_device(tree: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """`tree` with every tensor on `device`, floating-point ones as `dtype` if given.

    Traverses mappings, lists, tuples, named tuples and dataclasses. Other objects are moved by their own
    `to(device)` if they have one, and otherwise returned unchanged.

    >>> to_device({"x": torch.ones(2), "names": ["a", "b"]}, "cpu", torch.float64)
    {'x': tensor([1., 1.], dtype=torch.float64), 'names': ['a', 'b']}
    """
    if isinstance(tree, Tensor):
        kept = dtype if dtype and tree.is_floating_point() else tree.dtype
        return tree.to(device=device, dtype=kept, non_blocking=True)
    if isinstance(tree, PackedSequence):
        packed: Any = tree
        packed = packed.to(device)
        return packed.to(dtype) if dtype and packed.data.is_floating_point() else packed
    if isinstance(tree, Mapping):
        items = {key: to_device(value, device, dtype) for key, value in tree.items()}
        if not isinstance(tree, MutableMapping):
            return items
        same_kind = copy.copy(tree)  # a subclass may have attributes besides its items
        for key, value in items.items():
            same_kind[key] = value
        return same_kind
    if isinstance(tree, list | tuple):
        values = [to_device(value, device, dtype) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        same_kind = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # frozen ones too
            object.__setattr__(same_kind, field.name, to_device(getattr(tree, field.name), device, dtype))
        return same_kind
    if hasattr(tree, "to") and not isinstance(tree, type):
        return tree.to(device)
    return tree


def convert_tensors(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Converts the model's floating-point parameters and buffers to `dtype` in place, if given; not complex ones, of which
    `Module.to` would drop the imaginary part."""
    if dtype is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(dtype) if tensor.is_floating_point() else tensor.data
    own: dict[int, Tensor] = {}
    for module in model.modules():
        held = vars(module)["_buffers"]
        for name, tensor in held.items():
            # a view, such as a row of a table, still has its base, which is of the other precision
            if tensor is not None and tensor._is_view():
                held[name] = own.setdefault(id(tensor), tensor.detach().clone())

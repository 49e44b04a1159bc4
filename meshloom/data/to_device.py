"""Moves a batch, nested in any way, to a device, and a model to a precision."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from meshloom.program.ir.leaves import holds_tensors_itself

_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


def to_device(tree: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """`tree` with every tensor on `device`, floating-point ones as `dtype` if given.

    Traverses mappings, lists, tuples, named tuples, dataclasses and objects with tensors as attributes. Other objects are moved by their own
    `to(device)` if they have one, and otherwise returned unchanged.

    >>> to_device({"x": torch.ones(2), "names": ["a", "b"]}, "cpu", torch.float64)
    {'x': tensor([1., 1.], dtype=torch.float64), 'names': ['a', 'b']}
    """
    if isinstance(tree, Tensor):
        wanted = lifted(tree.dtype, dtype) if dtype else None
        return tree.to(device=device, dtype=wanted, non_blocking=True)
    if type(tree) in (list, tuple):
        return type(tree)([to_device(value, device, dtype) for value in tree])
    return _other_to_device(tree, device, dtype)


def _other_to_device(tree: Any, device: torch.device | str, dtype: torch.dtype | None) -> Any:
    if isinstance(tree, numpy.ndarray):  # stays on the CPU
        return in_dtype(tree, dtype)
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
    if holds_tensors_itself(tree):
        same_kind = copy.copy(tree)
        for key, value in vars(tree).items():
            setattr(same_kind, key, to_device(value, device, dtype))
        return same_kind
    return tree


def convert_tensors(model: nn.Module, dtype: torch.dtype | None, kept: Collection[int] = ()) -> None:
    """Converts the model's floating-point parameters and buffers to `dtype` in place, if given, and complex ones to parts
    of it, of which `Module.to` would drop the imaginary one. kept: `id` of tensors that stay as they are."""
    if dtype is None:
        return
    for tensor in (each for each in (*model.parameters(), *model.buffers()) if id(each) not in kept):
        tensor.data = tensor.data.to(lifted(tensor.dtype, dtype))
    own: dict[int, Tensor] = {}
    for module in model.modules():
        held = vars(module).get("_buffers", {})  # none of a traced one
        for name, tensor in held.items():
            # a view, such as a row of a table, still has its base, which is of the other precision
            if tensor is not None and tensor._is_view():
                held[name] = own.setdefault(id(tensor), tensor.detach().clone())


def in_dtype(array: Any, dtype: torch.dtype | None) -> Any:
    """The array, converted if it is of floating point and there is such a dtype in numpy."""
    if dtype not in (torch.float16, torch.float32, torch.float64) or not numpy.issubdtype(
        array.dtype, numpy.floating
    ):
        return array
    return array.astype(str(dtype).removeprefix("torch."))


def lifted(value: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """What becomes of a dtype in the precision `dtype`, if there is one: complex numbers have parts of it.

    >>> lifted(torch.complex64, torch.float64), lifted(torch.int64, torch.float64), lifted(torch.float32, None)
    (torch.complex128, torch.int64, torch.float32)
    """
    if dtype is None or not (value.is_floating_point or value.is_complex):
        return value
    return _COMPLEX.get(dtype, value) if value.is_complex else dtype

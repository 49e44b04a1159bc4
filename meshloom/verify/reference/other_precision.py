"""Conversion of a job to another floating-point precision, which tells a mistake from rounding."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshloom.program.ir.sparse_constants import keep_as_constants


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """A context in which new floating-point tensors have this dtype; None changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def convert(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same containers with every tensor on `device`, and floating-point tensors as `dtype` if given.

    >>> convert({"x": [torch.ones(1)], "name": "a"}, torch.device("cpu"), torch.float64)
    {'x': [tensor([1.], dtype=torch.float64)], 'name': 'a'}
    """
    if isinstance(tree, Tensor):
        return tree.to(device, _wanted(tree, dtype))
    if isinstance(tree, Mapping):
        items = {key: convert(value, device, dtype) for key, value in tree.items()}
        if type(tree) is dict or not hasattr(tree, "__setitem__"):
            return items
        like: Any = copy.copy(tree)
        for key, value in items.items():
            like[key] = value
        return like
    if isinstance(tree, list | tuple):
        values = [convert(value, device, dtype) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, numpy.ndarray):
        is_real = tree.dtype.kind == "f" and dtype in (torch.float16, torch.float32, torch.float64)
        return tree.astype(str(dtype).removeprefix("torch.")) if is_real else tree
    if isinstance(tree, type):
        return tree
    attributes = getattr(tree, "__dict__", {})
    if dataclasses.is_dataclass(tree):
        attributes = {each.name: getattr(tree, each.name) for each in dataclasses.fields(tree)}
    elif hasattr(tree, "to"):
        return tree.to(device)
    elif not any(isinstance(each, Tensor | numpy.ndarray) for each in attributes.values()):
        return tree
    like = copy.copy(tree)
    for name, each in attributes.items():
        object.__setattr__(like, name, convert(each, device, dtype))
    return like


def convert_model(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """`model` on `device`, its floating-point parameters and buffers as `dtype` if given, complex ones with such parts."""
    moved = model.to(device)
    for tensor in (*moved.parameters(), *moved.buffers()):
        tensor.data = tensor.data.to(_wanted(tensor, dtype))
    return keep_as_constants(moved)


def _wanted(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    parts = {torch.float32: torch.complex64, torch.float64: torch.complex128}
    if dtype is not None and tensor.is_complex():
        return parts.get(dtype, tensor.dtype)
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def most_precise(parameters: Iterable[Tensor]) -> torch.dtype:
    """The most precise floating-point dtype among the parameters."""
    dtypes = {each.dtype for each in parameters if each.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.get_default_dtype())

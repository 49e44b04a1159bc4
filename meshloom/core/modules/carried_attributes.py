"""Plain attributes in which a module's forward leaves tensors for its next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from meshloom.core.modules.class_code import names_read, names_set

_DEPTH = 3  # of tuples in tuples
Place = tuple[str, nn.Module, str]


def carrying_places(model: nn.Module) -> list[Place]:
    """(path, module, attribute) of what code of the model's classes, but for constructors, both reads and sets, where it
    holds nothing or tensors without gradients."""
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name in sorted(names_read(type(module)) & names_set(type(module)))
        if name not in _registered(module) and is_carried(vars(module).get(name))
    ]


def is_carried(value: Any, depth: int = 0) -> bool:
    """Whether a value is nothing, or tensors without gradients."""
    if value is None or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
        return value is None or not value.requires_grad
    return (
        isinstance(value, tuple | list)
        and depth < _DEPTH
        and all(is_carried(each, depth + 1) for each in value)
    )


def carried_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in such a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from carried_tensors(each)


def writes_to(tensor: Tensor) -> int:
    """How often a tensor has been written to in place, as far as torch counts it."""
    return -1 if tensor.is_inference() else tensor._version


def _registered(module: nn.Module) -> set[str]:
    return {name for kind in ("_parameters", "_buffers", "_modules") for name in vars(module).get(kind, ())}

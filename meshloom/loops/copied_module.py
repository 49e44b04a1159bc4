"""A deep copy of a module, whose functions see the copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` with this memo, which leaves functions as they are: those that a module holds, such as a lambda over its layers, close over
    the copy's."""
    found = copy.deepcopy(module, memo)
    for each in found.modules():
        for name, value in vars(each).items():
            if isinstance(value, FunctionType):
                vars(each)[name] = _over_copies(value, memo)
    return found


def refusal_of_graphs(module: nn.Module) -> str | None:
    """Why a module that has a tensor with a graph cannot be copied; None: it has none."""
    named = (
        (f"{path}.{name}".lstrip("."), value)
        for path, each in module.named_modules()
        for name, value in vars(each).items()
    )
    found = next((name for name, value in named if isinstance(value, Tensor) and value.grad_fn), None)
    return found and (
        f"{found} is a tensor that was computed of parameters when the module was made, as torch.nn.utils.weight_norm does. Use "
        "torch.nn.utils.parametrizations.weight_norm, or compute it in the forward; or use a plan with dp and zero alone."
    )


def _over_copies(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    cells = [_cell(each, memo) for each in function.__closure__ or ()]
    if all(one is other for one, other in zip(cells, function.__closure__ or (), strict=True)):
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _cell(cell: CellType, memo: Mapping[int, Any]) -> CellType:
    try:
        contents = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    return CellType(memo[id(contents)]) if id(contents) in memo else cell

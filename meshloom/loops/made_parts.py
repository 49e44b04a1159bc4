"""Parameters become parts, the same objects with less in them, and states of optimizers with them."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshloom.core.modules.compiled import not_compiled
from meshloom.loops.part_place import PartError, TensorPlace
from meshloom.loops.part_tensor import AsPlain, PartParameter, PartTensor, made_part


def make_part(parameter: nn.Parameter, place: TensorPlace) -> None:
    """Keeps this rank's part of a parameter that is whole, and of its gradient."""
    gradient, parameter.grad = parameter.grad, None
    become(parameter, PartParameter, place.own_part(parameter.data).clone())
    cast(PartParameter, parameter).place = place
    if gradient is not None:
        parameter.grad = place.own_part(gradient).clone()


def become(parameter: nn.Parameter, kind: type[nn.Parameter], data: Tensor, *, changed: bool = True) -> None:
    """The same object has this data, and is of this class. changed: whether what read it before would read something else now."""
    assign = cast(Any, Tensor.data).__set__
    with AsPlain():
        # A graph from before has a node of the parameter, with its shape, which torch lets go of where the dtype changes alone.
        other = torch.bfloat16 if data.dtype != torch.bfloat16 else torch.float32
        assign(parameter, data.new_empty(0, dtype=other))
        assign(parameter, data)
        parameter.__class__ = kind
        if changed:
            torch.autograd.graph.increment_version(parameter)


@cache
def keep_states_in_parts() -> None:
    """An optimizer's state that is whole, because it was loaded or made before, is in parts from its next step on."""
    register_optimizer_step_pre_hook(_states_in_parts)


_WHOLE = (torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PartError` for one that looks at whole parameters and has parts."""
    if isinstance(optimizer, _WHOLE) and any(isinstance(each, PartTensor) for each in _updated_by(optimizer)):
        raise PartError(
            f"{type(optimizer).__name__} looks at whole parameters, and this rank has parts of them. Write optimizer = ml.whole(optimizer), "
            "which has them whole in its steps."
        )


def _updated_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


@not_compiled
def _states_in_parts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if dynamo := sys.modules.get("torch._dynamo.config"):  # a step that is compiled runs as it is
        cast(Any, dynamo).nontraceable_tensor_subclasses |= {PartTensor, PartParameter}
    check_elementwise(optimizer)
    for each in _updated_by(optimizer):
        if not isinstance(each, PartTensor) or each not in optimizer.state:
            continue
        place, state = each.place, optimizer.state[each]
        for key, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, PartTensor) and value.shape == place.shape:
                state[key] = made_part(place.own_part(value).clone(), place)

"""Modules, optimizers and schedulers over other parameters than those that they were made with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshloom.core.job import NamedParameters


def with_parameters(module: nn.Module, named: NamedParameters) -> nn.Module:
    """A copy of `module` with these parameters in the places of those of the same names; all other tensors are shared."""
    memo = _others(module, named)
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {**{id(each): each for each in shared}, **memo})


def optimizer_of(optimizer: Optimizer, module: nn.Module, named: NamedParameters) -> Optimizer:
    """A copy of `optimizer`, which is over parameters of `module`, over those of the same names."""
    return _copied(optimizer, _others(module, named))


def schedulers_of(
    schedulers: Sequence[Any], before: Sequence[Optimizer], after: Sequence[Optimizer]
) -> list[Any]:
    """Copies of `schedulers`, which go by the optimizers `before`, that go by those `after`."""
    memo = {id(old): new for old, new in zip(before, after, strict=True)}
    copied = [_copied(each, memo) for each in schedulers]
    for optimizer in after:
        _mark_as_scheduled(optimizer)
    return copied


def _mark_as_scheduled(optimizer: Optimizer) -> None:
    """Let torch know that this optimizer has a scheduler, as making one does; rates stay as they are."""
    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, _constant)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _others(module: nn.Module, named: NamedParameters) -> dict[int, Any]:
    own = dict(module.named_parameters())
    return {id(own[name]): parameter for name, parameter in named}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    attributes = {
        name: each for name, each in vars(value).items() if name != "step"
    }  # torch's mark holds the old one
    made = object.__new__(type(value))
    vars(made).update(copy.deepcopy(attributes, dict(memo)))
    return made


def _constant(step: int) -> float:
    return 1.0

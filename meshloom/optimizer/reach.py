"""What the update of an element depends on: on that element alone, on its whole parameter, or on all parameters.

It decides what a rank may update without the others: a slice of a parameter, a full parameter, or only all of
them. The exact class of an optimizer decides, if it is one of torch's whose rule is known; for others the job says it,
else they get all parameters. A subclass, step hooks, and a `step` that was put in place of the class's may look further.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from meshloom.core.state_sizes import tensors_per_parameter

Reach = Literal["element", "parameter", "optimizer"]

ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam)
PER_PARAMETER = (Adafactor, Muon)  # the norm of a matrix, its rows and columns
# Bytes of state per byte of parameters: two averages, if an optimizer is not on the lists. Momentum adds one, as do other settings.
OPTIMIZER_FACTOR = 2.0


def reach(optimizer: Optimizer, *, elementwise: bool | None = None, per_parameter: bool = False) -> Reach:
    """What the update of an element depends on: "element", "parameter", or "optimizer" (all parameters, or unknown).

    elementwise, per_parameter: what the job says of optimizers that are not known.

    >>> from torch import nn, ones
    >>> parameter = nn.Parameter(ones(4, 4))
    >>> reach(AdamW([parameter])), reach(Adafactor([parameter]))
    ('element', 'parameter')
    """
    if is_known(optimizer):
        return "element" if type(optimizer) in ELEMENTWISE else "parameter"
    return "element" if elementwise else "parameter" if per_parameter else "optimizer"


def is_known(optimizer: Optimizer) -> bool:
    """Whether its class is on one of the lists, and its step is the class's."""
    return type(optimizer) in (*ELEMENTWISE, *PER_PARAMETER) and not added_to(optimizer)


def expected_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of its state, without counts of steps and Adafactor's rows and columns.

    >>> from torch import nn, ones
    >>> parameter = nn.Parameter(ones(4, 4))
    >>> expected_state_bytes(AdamW([parameter])), expected_state_bytes(SGD([parameter], lr=0.1, momentum=0.9))
    (128, 64)
    """
    total = 0.0
    for group in optimizer.param_groups:
        factor = tensors_per_parameter(optimizer, group) if is_known(optimizer) else OPTIMIZER_FACTOR
        total += factor * sum(each.nbytes for each in group["params"])
    return round(total)


def added_to(optimizer: Any) -> str:
    """What the user has added to the step of the optimizer's class, in words; "": nothing."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(
        getattr(optimizer, each, None) for each in hooks
    ):  # none of a wrapper that calls no `__init__` of torch's
        return "step hooks"
    return "another step in its place" if _own_step(optimizer) is not None else ""


def _own_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The function that the user has put in place of the optimizer's `step`, below that of a scheduler, if there is one."""
    step: Any = vars(optimizer).get("step")
    if step is None or not hasattr(step, "_wrapped_by_lr_sched"):
        return step
    inner = getattr(step, "__wrapped__", None)  # a scheduler's own is of the class's
    return None if inner in (None, type(optimizer).step) else MethodType(inner, optimizer)

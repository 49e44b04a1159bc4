"""The conventions by which torch.distributed calls a process group: default options, reductions, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.shm.engine_calls import Op
from meshloom.comm.torch.async_work import TransportError
from meshloom.core.errors import MeshloomError

_Kind: Any = dist.ReduceOp.RedOpType

BEFORE_TORCH_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}

_OPS = {
    _Kind.SUM: "sum",
    _Kind.AVG: "avg",
    _Kind.PRODUCT: "product",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "and",
    _Kind.BOR: "or",
    _Kind.BXOR: "xor",
    _Kind.PREMUL_SUM: "sum",
}


def collective(
    options: Callable[[], Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of a process group's methods that take tensors.

    The call goes to the backend of the tensors' device, and errors become those that callers of
    torch.distributed expect. options: constructs the last argument where the caller omits it.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        num_arguments = method.__code__.co_argcount - 1

        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if options and len(arguments) + len(named) < num_arguments:
                named["opts"] = options()
            try:
                tensor = _first_tensor(arguments)
                other = None if tensor is None else self.carrier_of(tensor.device.type)
                if other:
                    return _named(other, method.__name__)(*arguments, **named)
                return method(self, *arguments, **named)
            except MeshloomError as error:
                raise TransportError(str(error)) from error

        return call

    return decorate


def _named(group: Any, name: str) -> Any:
    return getattr(group, name if hasattr(group, name) else BEFORE_TORCH_2_13[name])


def op_of(kind: Any) -> Op:
    """The reduction of a `dist.ReduceOp`."""
    return cast(Op, _OPS[kind.__getstate__()[0]])


def scaled(tensor: Tensor, kind: Any) -> Tensor:
    """A summand of a `dist.ReduceOp`: `tensor`, scaled for PREMUL_SUM."""
    factor = kind.__getstate__()[1]
    if factor is None:
        return tensor
    return tensor * torch.as_tensor(factor, dtype=tensor.dtype, device=tensor.device)


def _first_tensor(arguments: Sequence[Any]) -> Tensor | None:
    """The first tensor among arguments that are tensors, lists of them, and lists of lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, list) and (found := _first_tensor(cast(list[Any], argument))) is not None:
            return found
    return None

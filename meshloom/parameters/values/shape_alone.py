"""Parameters that have everything but values, for code that gets parameters before a rank has any: using their values
raises, and whoever called it calls again with values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_GOT = (
    "_backward_hooks",
    "_base",
    "_version",
    "dtype",
    "grad",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_quantized",
    "is_sparse",
    "itemsize",
    "layout",
    "name",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
_CALLED = (
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)
_tensor: Any = Tensor
_OF_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in _GOT),
    *(getattr(Tensor, name) for name in _CALLED),
    _tensor.grad.__set__,
    _tensor.requires_grad.__set__,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
}


class ValueReadError(Exception):
    """A value is used that is not there."""


class ShapeAlone(nn.Parameter):
    """A parameter like `other`, with its attributes, on whose device it seems to be.

    >>> made = ShapeAlone.like(nn.Parameter(torch.ones(2, 3)))
    >>> made.ndim, made.numel(), str(made.device)
    (2, 6, 'cpu')
    >>> made.norm()
    Traceback (most recent call last):
    meshloom.parameters.values.shape_alone.ValueReadError: norm
    """

    _where: torch.device

    @classmethod
    def like(cls, other: nn.Parameter) -> ShapeAlone:
        made = cls(torch.empty_like(other.detach(), device="meta"), requires_grad=other.requires_grad)
        vars(made).update(vars(other), _where=other.device)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _tensor.device.__get__:
            return args[0]._where
        if func not in _OF_SHAPE:
            raise ValueReadError(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            return func(*args, **(kwargs or {}))

"""Gradients of batch norm of a single sample on CPUs, which torch may compute wrong.

Strides say nothing of a dim of one element, so torch's kernel can take a sample and its gradient for alike in memory where
one has its channels last and the other does not: it then pairs elements of different places (`tests/test_on_cpu.py`). So
gradients get the layout of what they are of, also within parts of a program that run as written. Models that run as written as a
whole have torch's own gradients, as one device has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.program.ir.program import Program

_aten = torch.ops.aten
NORMS = _aten.batch_norm.default, _aten.instance_norm.default
_FUNCTIONS = torch.batch_norm, torch.instance_norm, functional.batch_norm, functional.instance_norm


def aligned(norm: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The result of `norm`, one of `NORMS` or a function of torch, whose gradient gets its layout before the norm's backward."""
    normed = norm(*args, **kwargs)
    if normed.requires_grad and _is_single(normed):
        normed.register_hook(partial(_laid_out, normed.shape, normed.stride()))
    return normed


class AlignedGradients(TorchDispatchMode):
    """A context in which a model that runs as written has such gradients, around its backward."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _aten.native_batch_norm_backward.default and _is_single(args[1]):
            args = (*(each.contiguous() for each in args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))


class AlignedNorms(TorchFunctionMode):
    """A context in which norms of single samples have such gradients, around the forward of code that runs as written."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _FUNCTIONS:
            return aligned(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def has_single_samples(program: Program) -> bool:
    """Whether a bound program has a norm whose gradient may be wrong in eager, also within a leaf."""
    return program.device.type == "cpu" and any(
        getattr(node.target, "has_batch_norms", False)
        or (node.target in NORMS and node.outputs[0].shape[0] == 1)
        for node in program.nodes
    )


def _is_single(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.ndim > 3 and x.shape[0] == 1


def _laid_out(shape: Sequence[int], stride: Sequence[int], gradient: Tensor) -> Tensor:
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

"""Batch norm over the joined chunk of all replicas: they share their statistics inside forward and backward.

    forward    count, mean, M2 of my samples -> all-gather -> joined mean and variance      (Chan, Golub & LeVeque, 1979)
    backward   sum dy, sum dy * x_hat        -> all-reduce -> dx = weight / std * (dy - sum dy / n - x_hat * sum dy x_hat / n)

Gradients of weight and bias stay this replica's own sums, because the exchange adds gradients over replicas.
All ranks must run the same layers in the same order, and each waits for the others in every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.comm.group import Group
from meshloom.core.errors import JobError, TrainingError
from meshloom.core.modules.compiled import not_compiled
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


@contextmanager
def synchronise_batch_norm(
    model: nn.Module, group: Group, *, meet: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """While entered, batch norm layers take their training statistics over the ranks of `group` together.

    Classes, names and structure stay; each layer's `forward` is replaced on the instance. Running statistics
    become those of one device that runs the joined chunk, with the same bits on every rank. Evaluation mode
    is untouched. Where the model is compiled, these layers stay out of it. meet: is called before ranks exchange something.
    Raises `JobError` for a layer with a forward of its own, which cannot be replaced.
    """
    layers = join_batch_norm(model, group, lambda x: 1.0, meet)
    try:
        yield
    finally:
        for each in layers:
            vars(each).pop("forward", None)


def join_batch_norm(
    model: nn.Module, group: Group, weight: Callable[[Tensor], float | None], meet: Callable[[], None] = lambda: None
) -> list[nn.Module]:  # fmt: skip
    """The same from now on; the layers that are joined now. weight: given what a layer is called with, what gradients of this rank's loss are multiplied
    with after backward: 0 where its rows count nothing, None where all ranks have the same rows."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(vars(module).get("forward"), _JoinedForward)
    ]
    for name, module in layers:
        if type(module).forward is not _BatchNorm.forward or "forward" in vars(module):
            raise JobError(
                f"{name or 'The model'} is a {type(module).__name__} with a forward of its own, whose statistics cannot be synchronised. "
                "Use torch.nn.BatchNorm1d, 2d or 3d, or a plan without sync_batch_norm."
            )
    for name, module in layers:
        forward: Any = _JoinedForward(name, module, group, weight, meet)
        module.forward = forward
    return [module for _, module in layers]


def expected_bytes(model: nn.Module, num_chunks: int) -> ExpectedBytes:
    """Of a step's chunks, if every layer runs once in each and its input needs a gradient."""
    channels = [module.num_features for module in model.modules() if isinstance(module, _BatchNorm)]
    gathered = sum(8 * (1 + 2 * count) for count in channels)
    reduced = sum(8 * 2 * count for count in channels)
    return ExpectedBytes(per_step=Traffic.along("dp", all_gather=gathered, all_reduce=reduced) * num_chunks)


class _JoinedForward:
    """The forward of `module`. A copy of the module, and one that is read from a file, has that of its class."""

    def __init__(
        self, name: str, module: Any, group: Group, weight: Callable[[Tensor], float | None], meet: Callable[[], None]
    ) -> None:  # fmt: skip
        self._name, self._module, self._group, self._weight, self._meet = name, module, group, weight, meet

    @not_compiled
    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        weight = self._weight(x) if module.training else None
        if weight is None:
            return _BatchNorm.forward(module, x)
        module._check_input_dim(x)
        self._meet()
        count, mean, variance = _joined_statistics(x.detach() if weight else x.detach()[:0], self._group)
        if x.numel() <= x.shape[1] and count <= 1:  # else there are enough here: the device need not be asked
            raise TrainingError(
                f"Batch norm {self._name} got {int(count)} value(s) per channel over all replicas, and a variance needs 2 or more. Use a larger batch."
            )
        if module.track_running_stats and module.running_mean is not None:
            _update_running(module, count, mean, variance)
        return _Normalise.apply(x, module.weight, module.bias, mean, variance, count, module.eps, self._group, self._meet, weight)  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return partial(_BatchNorm.forward, memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        return partial, (_BatchNorm.forward, self._module)


def _joined_statistics(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Count per channel [], mean and biased variance [channels] (float64) of all ranks' x [n, channels, ...]."""
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    part = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count:
        variance, mean = torch.var_mean(x.to(_precision(x)), _others(x), correction=0)
        part[0] = count
        part[1 : 1 + channels] = mean
        part[1 + channels :] = variance.double() * count
    everyone = part.new_empty(group.size * len(part))
    group.all_gather(everyone, part).wait()
    total, mean, m2 = (
        torch.zeros_like(part[0]),
        torch.zeros_like(part[1 : 1 + channels]),
        torch.zeros_like(part[1 : 1 + channels]),
    )
    for row in everyone.view(group.size, -1):  # one without values changes nothing
        size, total = row[0], total + row[0]
        least, delta = total.clamp(min=1), row[1 : 1 + channels] - mean
        mean = mean + delta * (size / least)
        m2 = m2 + row[1 + channels :] + delta.square() * (size * (total - size) / least)
    return total, mean, m2 / total.clamp(min=1)


def _update_running(module: Any, count: Tensor, mean: Tensor, variance: Tensor) -> None:
    """What torch's layer does after a batch of `count` values per channel, of this biased `variance`."""
    factor: Any = 0.0 if module.momentum is None else module.momentum
    with torch.no_grad():
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / module.num_batches_tracked.double()
        unbiased = variance * (count / (count - 1))
        for running, batch in ((module.running_mean, mean), (module.running_var, unbiased)):
            running.copy_((1.0 - factor) * running.double() + factor * batch)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the gradient through all ranks' statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
        count: Tensor, eps: float, group: Group, meet: Callable[[], None], share: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.has_bias, ctx.count, ctx.eps, ctx.group, ctx.meet, ctx.share = (
            bias is not None,
            count,
            eps,
            group,
            meet,
            share,
        )
        precision = _precision(x)
        affine = _cast(weight, precision), _cast(bias, precision)
        # In evaluation mode torch's kernel normalises with what it is given.
        return F.batch_norm(x, mean.to(precision), variance.to(precision), *affine, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        x, weight, mean, variance = ctx.saved_tensors
        precision = _precision(x)
        others, shape = _others(x), (1, -1, *[1] * (x.ndim - 2))
        inverse = (variance + ctx.eps).rsqrt()
        dy = grad.to(precision)
        normal = (x.to(precision) - mean.to(precision).view(shape)) * inverse.to(precision).view(shape)
        own = torch.stack([dy.sum(others).double(), (dy * normal).sum(others).double()])
        grad_weight = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_x = grad_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = own[0].to(grad.dtype if weight is None else weight.dtype)
        if ctx.needs_input_grad[0]:  # on all ranks or on none
            sums = own * ctx.share
            ctx.meet()
            ctx.group.all_reduce(sums).wait()
            average = (sums / (ctx.count * (ctx.share or 1))).to(precision)
            scale = inverse if weight is None else inverse * weight.detach().double()
            centred = dy - average[0].view(shape) - normal * average[1].view(shape)
            grad_x = (centred * scale.to(precision).view(shape)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, *[None] * 7


def _others(x: Tensor) -> list[int]:
    """All dims but that of channels."""
    return [0, *range(2, x.ndim)]


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)

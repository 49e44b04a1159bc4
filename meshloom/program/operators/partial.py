"""Operators on a shard of their operands, where the plain operator would compute something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshloom.comm.group import Group
from meshloom.program.operators.collectives import Joint, all_reduced, refuse_second_derivative


def mean_of_part(
    x: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None
) -> Tensor:
    """This shard's share of a mean over `count` elements: shares sum to the mean. As a mean, it adds up in float32 at least."""
    result = dtype or x.dtype
    total = x.sum(list(dims), keepdim, dtype=torch.promote_types(result, torch.float32))
    return (total / count).to(result)


def loss_of_part(
    loss: Callable[..., Tensor], x: Tensor, target: Tensor, count: int, settings: Mapping[str, Any]
) -> Tensor:
    """This shard's share of a mean of `count` elementwise losses."""
    return loss(x, target, reduction=2, **settings) / count


def zeros_of(*operands: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros [shape], for kernels that do not support empty shards.

    Backward sends zeros to `operands`: there may be collectives behind them, which other ranks wait for.
    """
    function: Any = _Zeros.apply
    return function(tuple(shape), *operands)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *operands: Tensor) -> Tensor:
        ctx.likes = [each.detach() for each in operands]
        return operands[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *map(torch.zeros_like, ctx.likes)


def convolution_of_nothing(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int], *would_be: Any
) -> Tensor:
    """A convolution without input or output channels: its bias [c] everywhere in `shape`, or an empty tensor.

    would_be: the operator on ranks that have channels, and its settings.
    """
    zeros = zeros_of(x, weight, shape=shape)
    return zeros if bias is None else zeros + bias.reshape(-1, *(1,) * (weight.ndim - 2))


def grouped_product_of_part(
    product: Callable[..., Tensor], x: Tensor, w: Tensor, ends: Tensor | None
) -> Tensor:
    """`_grouped_mm` of shards whose rows are not multiples of 16 bytes, padded with zeros.

    x [t, k] or [groups, t, k], w [groups, k, n] or [k, n].
    """
    step = 16 // x.element_size()
    inner, outer = (-size % step or step * (not size) for size in (x.shape[-1], w.shape[-1]))
    if not inner and not outer:
        return product(x, w, ends)
    return product(pad(x, (0, inner)), pad(w, (0, outer, 0, inner)), ends)[..., : w.shape[-1]]


def embedding_of_part(weight: Tensor, index: Tensor, start: int, padding: int) -> Tensor:
    """Rows of an embedding of which `weight` [rows, d] is the part from row `start` on; zeros for other rows.

    index [*] -> [*, d]. The ranks' results sum to the full embedding.
    """
    here = (index >= start) & (index < start + weight.shape[0])
    if not weight.shape[0]:
        return zeros_of(weight, shape=(*index.shape, weight.shape[1]))
    local = torch.where(here, index - start, 0)
    inside = padding - start if start <= padding < start + weight.shape[0] else -1
    found = torch.ops.aten.embedding.default(weight, local, inside)
    return torch.where(here.unsqueeze(-1), found, 0.0)


def cosine_losses_of_part(one: Tensor, other: Tensor, target: Tensor, margin: float, count: int) -> Tensor:
    """This shard's share of a mean of `count` cosine embedding losses of pairs."""
    return torch.ops.aten.cosine_embedding_loss.default(one, other, target, margin, 2) / count


def negative_log_likelihood_of_part(
    x: Tensor, target: Tensor, start: int, reduction: int, ignored: int
) -> Tensor:
    """This shard's share of `nll_loss`, from the log-probabilities of the classes from `start` on; shares add
    up.

    x [n, part of v, space], target [n, space]. reduction: 0 none, 1 mean, 2 sum, as in ATen.
    """
    if not x.shape[1]:
        return zeros_of(x, shape=target.shape if reduction == 0 else ())
    here = (target >= start) & (target < start + x.shape[1]) & (target != ignored)
    found = x.gather(1, torch.where(here, target - start, 0).unsqueeze(1)).squeeze(1)
    losses = torch.where(here, -found, 0.0)
    if reduction == 0:
        return losses
    total = losses.sum()
    return total / (target != ignored).sum() if reduction == 1 else total


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOfPart(Joint):
    """Cross-entropy where every rank has the logits of some classes, and all of them get the loss.

    Two all-reduces: the largest logit per row; then `num_sums` numbers per row: the sum of exponentials, the
    target's logit, with class weights the target's weight, and for smoothing the sum of logits. Backward
    needs no communication: softmax minus target of this part (Shoeybi et al., 2019).

    starts: first class of every rank's part. weighted: whether classes have weights.
    reduction: 0 none, 1 mean, 2 sum, as in ATen. widened: whether it is computed in float32 at least, as autocast does.
    """

    starts: tuple[int, ...]
    num_classes: int
    reduction: int
    ignored: int
    smoothing: float
    weighted: bool = False
    widened: bool = False

    @property
    def num_sums(self) -> int:
        """Numbers per row of the second all-reduce."""
        return 2 + self.weighted + bool(self.smoothing) * (1 + self.weighted)

    def run(self, group: Group, logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Logits [n, part of v, space], target [n, space], weight [part of v] -> the loss."""
        function: Any = _CrossEntropy.apply
        with torch.autocast(logits.device.type, enabled=False):
            weight_of_rows, losses = function(self, group, target.reshape(-1), weight, self._rows(logits))
            return self._reduce(losses, target, weight_of_rows)

    def _rows(self, logits: Tensor) -> Tensor:
        """[n, v, space] -> [n space, v]."""
        if self.widened:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if logits.ndim == 2 else logits.movedim(1, -1).flatten(0, -2)

    def _reduce(self, losses: Tensor, target: Tensor, weight_of_rows: Tensor | None) -> Tensor:
        if self.reduction == 0:
            return losses.view(target.shape)
        total = losses.sum()
        if self.reduction == 2:
            return total
        return total / ((target != self.ignored).sum() if weight_of_rows is None else weight_of_rows.sum())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: CrossEntropyOfPart,
        group: Group,
        target: Tensor,
        weight: Tensor | None,
        logits: Tensor,
    ) -> Any:
        """Weight of every row [n] or None, and the loss of every row [n]."""
        rows, classes = logits.shape
        top = logits.amax(1) if classes else logits.new_full((rows,), torch.finfo(logits.dtype).min)
        shifted = logits - all_reduced(group, top, "max")[:, None]
        counted = target != part.ignored
        local = target - part.starts[group.rank]
        here = (local >= 0) & (local < classes) & counted
        local = torch.where(here, local, 0)
        found = shifted.gather(1, local[:, None])[:, 0] if classes else logits.new_zeros(rows)
        summed = [torch.where(here, found, 0.0)]
        if weight is None:
            summed += [shifted.sum(1)] if part.smoothing else []
        else:
            summed.append(torch.where(here, weight[local], 0.0) if classes else logits.new_zeros(rows))
            summed += [shifted @ weight, weight.sum().expand(rows)] if part.smoothing else []
        exponentials = shifted.exp_()
        everyone = all_reduced(group, torch.stack([exponentials.sum(1), *summed]), "sum")
        log_sum = everyone[0].log()
        weight_of_rows = None if weight is None else everyone[2].clone()
        losses = log_sum - everyone[1]
        if weight_of_rows is not None:
            losses = weight_of_rows * losses
        weight_of_classes: Any = part.num_classes if weight is None else everyone[-1]
        if part.smoothing:
            every_class = log_sum * weight_of_classes - (everyone[2] if weight is None else everyone[3])
            losses = (1 - part.smoothing) * losses + part.smoothing / part.num_classes * every_class
        losses = torch.where(counted, losses, 0.0)
        ctx.part, ctx.place, ctx.counted = part, (here, local), counted
        ctx.weight_of_rows, ctx.weight_of_classes, ctx.sum = weight_of_rows, weight_of_classes, everyone[0]
        ctx.save_for_backward(exponentials, weight)
        if weight_of_rows is not None:
            ctx.mark_non_differentiable(weight_of_rows)
        return weight_of_rows, losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        part: CrossEntropyOfPart = ctx.part
        exponentials, weight = ctx.saved_tensors
        here, local = ctx.place
        smoothing = part.smoothing / part.num_classes
        arriving = gradients[1] * ctx.counted  # weights of rows have no gradient
        of_target = arriving * (1.0 - part.smoothing)
        if weight is not None:
            of_target = of_target * ctx.weight_of_rows
        # Factors per row are multiplied first: the logits are large, and are read once.
        of_rows = (of_target + arriving * smoothing * ctx.weight_of_classes) / ctx.sum
        result = exponentials * of_rows[:, None]
        if part.smoothing:
            result -= arriving[:, None] * (smoothing if weight is None else smoothing * weight)
        if result.shape[1]:
            result.scatter_add_(1, local[:, None], -(here * of_target)[:, None])
        return None, None, None, None, result

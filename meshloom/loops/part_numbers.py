"""A number of a whole tensor from the parts of it: sums, extremes and norms over the ranks that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp
from meshloom.loops.part_place import PartError, TensorPlace

NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"})
SUMS = frozenset({"sum", "mean", "count_nonzero"})
EXTREMES: dict[str, ReduceOp] = {"max": "max", "amax": "max", "min": "min", "amin": "min"}
TRUTHS: dict[str, ReduceOp] = {"any": "max", "all": "min", "equal": "min", "allclose": "min"}


def summed(value: Tensor, group: Group) -> Tensor:
    """The sum over ranks, with the gradient that each rank's own term has."""
    return cast(Any, _Summed).apply(value, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return over_ranks(value, group, "sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return cast(Any, _OfEach).apply(*gradients, ctx.group), None


class _OfEach(torch.autograd.Function):
    """A number that all ranks have, in each rank's own term; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return cast(Any, _Summed).apply(*gradients, ctx.group), None


def _counted(values: Tensor, place: TensorPlace) -> Tensor:
    """The sum of those that this rank counts; all that it has get its gradient."""
    return cast(Any, _Counted).apply(values, place)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: TensorPlace) -> Tensor:
        ctx.shape = values.shape
        return place.counted(values).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].expand(ctx.shape), None


def over_ranks(value: Tensor, group: Group, op: ReduceOp) -> Tensor:
    """A number of each rank, or several, reduced over the ranks; without its graph."""
    total = value.detach().reshape(-1).clone()
    group.all_reduce(total, op).wait()
    return total.view(value.shape)


def number_of(
    name: str, local: Tensor, place: TensorPlace, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What the function called `name` gives for the whole. args, kwargs: the others. None: it is no number, or has a gradient that
    the parts do not tell."""
    group, kwargs = (
        place.group,
        {key: each for key, each in kwargs.items() if each is not None and each is not False},
    )
    if name in ("equal", "allclose"):
        alike = getattr(torch, name)(local, *args, **kwargs)
        return bool(over_ranks(torch.tensor([alike], dtype=torch.int32, device=local.device), group, "min"))
    if name in NORMS:
        return _norm(name, local, place, *args, **kwargs)
    if args or kwargs:
        return None
    if name == "mean":
        return (summed(_counted(_precise(local), place), group) / place.shape.numel()).to(local.dtype)
    if name == "sum":
        return summed(_counted(local, place), group)
    local = place.counted(local)
    if name in SUMS:
        return summed(local.count_nonzero(), group)
    if name in TRUTHS:
        truth = local.any() if name == "any" else local.all()
        return over_ranks(truth.to(torch.int32), group, TRUTHS[name]).to(torch.bool)
    if torch.is_grad_enabled() and local.requires_grad:
        return None
    return over_ranks(_extreme(local, EXTREMES[name]), group, EXTREMES[name])


def foreach_norm(
    tensors: Sequence[Tensor], places: Sequence[TensorPlace | None], order: float = 2.0, dtype: Any = None
) -> list[Tensor]:
    """The norm of each, with one reduction of all that have parts in one group. places: None: the tensor is whole."""
    counted = [
        each if place is None else place.counted(each) for place, each in zip(places, tensors, strict=True)
    ]
    norms = [_local_norm(each, order, dtype) for each in counted]
    kinds = [(place.group, each.dtype) if place else None for place, each in zip(places, norms, strict=True)]
    for kind in dict.fromkeys(each for each in kinds if each):
        own = [i for i, each in enumerate(kinds) if each == kind]
        together = _combined(torch.stack([norms[i] for i in own]), kind[0], order)
        for i, each in zip(own, together.unbind(), strict=True):
            norms[i] = each
    return norms


def _norm(
    name: str,
    local: Tensor,
    place: TensorPlace,
    p: Any = None,
    dim: Any = None,
    dtype: Any = None,
    **others: Any,
) -> Tensor | None:
    given = others.pop("ord", p)
    order = 2 if given is None or given == "fro" else given
    if others or dim is not None or not isinstance(order, int | float) or (name == "linalg_norm" and given):
        return None
    if not (torch.is_grad_enabled() and local.requires_grad):
        return _combined(_local_norm(place.counted(local), order, dtype), place.group, order)
    if order == float("inf") or order <= 0:
        return None
    local = local if dtype is None else local.to(dtype)
    powers = _precise(local.square() if order == 2 else local.abs().pow(order))
    total = summed(_counted(powers, place), place.group)
    some = total != 0  # the gradient of a norm at zero is zero
    return (torch.where(some, total, 1).pow(1 / order) * some).to(local.dtype)


def _local_norm(local: Tensor, order: float, dtype: Any) -> Tensor:
    if local.numel() == 0 and order == float("inf"):
        return local.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(local, order, dtype=dtype)


def _combined(norms: Tensor, group: Group, order: float) -> Tensor:
    if order == float("inf"):
        return over_ranks(norms, group, "max")
    if order <= 0:
        raise PartError(
            f"A norm over ranks is of an order above 0, not {order}. ml.whole(parameter) is all of it."
        )
    return over_ranks(_precise(norms).pow(order), group, "sum").pow(1 / order).to(norms.dtype)


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _extreme(local: Tensor, op: ReduceOp) -> Tensor:
    if local.numel():
        return local.max() if op == "max" else local.min()
    if local.is_floating_point():
        return local.new_full((), float("-inf") if op == "max" else float("inf"))
    limits = torch.iinfo(local.dtype)
    return local.new_full((), limits.min if op == "max" else limits.max)

"""Losses of classes and pairs: cross-entropy and likelihood, also with a sharded vocabulary."""

from __future__ import annotations

from typing import Any

from meshloom.program.operators.partial import (
    CrossEntropyOfPart,
    cosine_losses_of_part,
    negative_log_likelihood_of_part,
)
from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Dims, Factors, ShardSizes
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument


def _class_dims(scores: TensorArgument) -> tuple[Dims, Dims, dict[str, int]]:
    """The dims of scores [n, v, space] and of targets [n, space], and the labels' sizes."""
    space = tuple(f"s{place}" for place in range(len(scores.shape) - 2))
    sizes = dict(zip(("n", "v", *space), scores.shape, strict=True))
    return ("n", "v", *space), ("n", *space), sizes


def _cross_entropy(call: Call) -> Factors | None:
    """logits [n, v, space], targets [n, space] (class numbers), weights of the classes [v] -> the mean, the
    sum or [n, space].

    A sharded v takes two small all-reduces; every rank has the full loss.
    """
    logits, target = call.operands[:2]
    weighted = isinstance(call.arguments.get("weight"), TensorArgument)
    if len(logits.shape) < 2 or target.meta.dtype.is_floating_point:
        return None
    reduction: int = call.arguments.get("reduction", 1)
    ignored: int = call.arguments.get("ignore_index", -100)
    smoothing: float = call.arguments.get("label_smoothing", 0.0)

    def local(to: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if not shard.is_sharded("v"):
            return to, args, kwargs
        part = CrossEntropyOfPart(
            starts=shard.starts["v"],
            num_classes=shard.full["v"],
            reduction=reduction,
            ignored=ignored,
            smoothing=smoothing,
            weighted=weighted,
            widened=call.outputs[0].dtype != logits.meta.dtype,
        )
        return part, (*args[:2], *([args[2] if len(args) > 2 else kwargs["weight"]] if weighted else [])), {}

    scores, rows, sizes = _class_dims(logits)
    return Factors(
        operands=(scores, rows, *([("v",)] if weighted else [])), outputs=(rows if reduction == 0 else (),), sizes=sizes,
        unsharded=frozenset() if reduction == 0 else frozenset(sizes) - {"v"},
        reduced_inside=frozenset({"v"}), contiguous=frozenset({"v"}), local=local,
    )  # fmt: skip


def _likelihood(call: Call) -> Factors | None:
    """nll_loss: log-probabilities [n, v, space], targets [n, space] -> the mean, the sum or [n, space]. A
    shard of v adds the targets in it."""
    x = call.operands[0]
    if isinstance(call.arguments.get("weight"), TensorArgument) or len(x.shape) < 2:
        return None
    reduction: int = call.arguments.get("reduction", 1)
    ignored: int = call.arguments.get("ignore_index", -100)
    scores, rows, sizes = _class_dims(x)
    samples = frozenset(sizes) - {"v"}
    cast = frozenset({"v"} if call.outputs[0].dtype != x.meta.dtype else ())  # by autocast

    def local(to: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if shard.local["v"] == shard.full["v"]:
            return to, args, kwargs
        own = (*args[:2], shard.starts["v"][shard.rank], reduction, ignored)
        return negative_log_likelihood_of_part, own, {}

    return Factors(
        operands=(scores, rows), outputs=(rows if reduction == 0 else (),), sizes=sizes,
        sums=frozenset({"v"}) | (samples if reduction == 2 else frozenset()), unsharded=cast | (samples if reduction == 1 else frozenset()),
        nonempty=samples, contiguous=frozenset({"v"}), linear=FIRST_LINEAR, local=local,
    )  # fmt: skip


def _cosine(call: Call) -> Factors | None:
    """cosine_embedding_loss: pairs of vectors [n, d], targets [n] of 1 or -1 -> the mean, the sum or [n]."""
    one, other, target = call.operands
    if len(one.shape) != 2 or one.shape != other.shape or len(target.shape) != 1:
        return None
    reduction: int = call.arguments["reduction"]
    count = one.shape[0]

    def local(to: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if shard.local["n"] == shard.full["n"] or reduction != 1:
            return to, args, kwargs
        return cosine_losses_of_part, (*args[:3], call.arguments["margin"], count), {}

    return Factors(
        operands=(("n", None), ("n", None), ("n",)), outputs=(("n",) if reduction == 0 else (),), sizes={"n": count},
        sums=frozenset() if reduction == 0 else frozenset({"n"}), local=local,
    )  # fmt: skip


LOSSES: dict[str, Rule] = {
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(("nll_loss", "nll_loss_nd", "nll_loss2d"), _likelihood),
    "cosine_embedding_loss": _cosine,
}

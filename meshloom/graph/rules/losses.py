"""Cross-entropy, over a part of the vocabulary too."""

from __future__ import annotations

from typing import Any

from meshloom.graph.operators import CrossEntropyOfPart
from meshloom.graph.rules.call import Call, Operand, Rule
from meshloom.graph.rules.factors import Dims, Factors, Sizes


def _cross_entropy(call: Call) -> Factors | None:
    """logits [n, v, space], targets [n, space] (class numbers), weights of the classes [v] -> the mean, the sum or [n, space].

    A part of v takes two small all-reduces, and gives the whole loss.
    """
    logits, target = call.operands[:2]
    weighted = isinstance(call.arguments.get("weight"), Operand)
    if len(logits.shape) < 2 or target.meta.dtype.is_floating_point:
        return None
    reduction: int = call.arguments.get("reduction", 1)
    ignored: int = call.arguments.get("ignore_index", -100)
    smoothing: float = call.arguments.get("label_smoothing", 0.0)

    def local(to: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        if here.here["v"] == here.whole["v"] and len(set(here.starts["v"])) == 1:
            return to, args, kwargs
        part = CrossEntropyOfPart(
            starts=here.starts["v"], num_classes=here.whole["v"], reduction=reduction, ignored=ignored, smoothing=smoothing, weighted=weighted
        )
        return part, (*args[:2], *([args[2] if len(args) > 2 else kwargs["weight"]] if weighted else [])), {}

    space: Dims = tuple(f"s{place}" for place in range(len(logits.shape) - 2))
    rows: Dims = ("n", *space)
    sizes = {"n": logits.shape[0], "v": logits.shape[1]} | {f"s{place}": size for place, size in enumerate(logits.shape[2:])}
    return Factors(
        operands=(("n", "v", *space), rows, *([("v",)] if weighted else [])), outputs=(rows if reduction == 0 else (),), sizes=sizes,
        whole=frozenset() if reduction == 0 else frozenset(sizes) - {"v"},
        joins=frozenset({"v"}), in_one_run=frozenset({"v"}), local=local,
    )  # fmt: skip


LOSSES: dict[str, Rule] = {"cross_entropy_loss": _cross_entropy}

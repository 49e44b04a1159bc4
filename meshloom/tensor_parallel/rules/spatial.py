"""Operators on spatial neighbourhoods (pooling, resizing, windows): sharded by batch and channels, not in
space."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Dims, Factors, Product, Term, labels_of
from meshloom.tensor_parallel.rules.operator_call import Call, Rule


def _channels(call: Call) -> Factors | None:
    """x [b, c, space] -> [b, c, space]: batch and channels may be sharded."""
    x = call.operands[0]
    if len(call.operands) != 1 or any(len(out.shape) != len(x.shape) for out in call.outputs):
        return None
    batched = len(x.shape) - _space(call)
    dims, sizes = labels_of(x.shape, range(batched, len(x.shape)))
    outputs, linear = (dims,) * len(call.outputs), FIRST_LINEAR if "max" not in call.name else ()
    return Factors(operands=(dims,), outputs=outputs, sizes=sizes, linear=linear, nonempty=frozenset(sizes))


def _space(call: Call) -> int:
    return next(
        (count for count in (1, 2, 3) if f"{count}d" in call.name),
        2 if "bi" in call.name else 1 if "linear1" in call.name else 3,
    )


def _pixel_shuffle(call: Call) -> Factors | None:
    """x [*, (c r s), h, w] -> [*, c, (h r), (w s)]; pixel_unshuffle is the inverse."""
    back = call.name == "pixel_unshuffle"
    fine, coarse = (call.operands[0], call.outputs[0]) if back else (call.outputs[0], call.operands[0])
    factor: int = call.arguments["downscale_factor" if back else "upscale_factor"]
    lead: list[Term] = [f"b{place}" for place in range(len(fine.shape) - 3)]
    sizes = {f"b{place}": fine.shape[place] for place in range(len(lead))}
    sizes |= {"c": fine.shape[-3], "h": coarse.shape[-2], "w": coarse.shape[-1], "r": factor, "s": factor}
    packed: Dims = (*lead, Product(("c", "r", "s")), "h", "w")
    spread: Dims = (*lead, "c", Product(("h", "r")), Product(("w", "s")))
    one, other = (spread, packed) if back else (packed, spread)
    return Factors(
        operands=(one,), outputs=(other,), sizes=sizes, unsharded=frozenset({"r", "s"}), nonempty=frozenset(sizes), linear=FIRST_LINEAR
    )  # fmt: skip


def _im2col(call: Call) -> Factors | None:
    """x [b, c, space] -> columns [b, (c kernel), windows]; col2im is the inverse."""
    x, out = call.operands[0].shape, call.outputs[0].shape
    image, columns = (out, x) if call.name == "col2im" else (x, out)
    lead: list[Term] = ["b"] if len(columns) == 3 else []
    channels = image[-3]
    sizes = {"c": channels, "k": columns[-2] // channels} | ({"b": image[0]} if lead else {})
    one: Dims = (*lead, "c", None, None)
    other: Dims = (*lead, Product(("c", "k")), None)
    one, other = (other, one) if call.name == "col2im" else (one, other)
    return Factors(
        operands=(one,), outputs=(other,), sizes=sizes, unsharded=frozenset({"k"}), nonempty=frozenset(sizes) - {"k"}, linear=FIRST_LINEAR
    )  # fmt: skip


def _windows(call: Call) -> Factors | None:
    """unfold: a dim becomes windows and their contents; the others may be sharded."""
    x = call.operands[0]
    dim = call.dim("dimension", len(x.shape))
    names, sizes = labels_of(x.shape, {dim})
    return Factors(operands=(names,), outputs=((*names, None),), sizes=sizes, linear=FIRST_LINEAR)


def _channel_dropout(call: Call) -> Factors | None:
    """dropout1d, dropout2d, dropout3d drop entire channels."""
    names, sizes = labels_of(call.operands[0].shape)
    drawn = (*names[:2], *(None,) * (len(names) - 2))
    return Factors(operands=(names,), outputs=(names,), sizes=sizes, linear=FIRST_LINEAR, drawn=drawn)


SPATIAL: dict[str, Rule] = {
    **dict.fromkeys(
        [
            f"{kind}_pool{count}d"
            for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
            for count in (1, 2, 3)
        ]
        + [f"upsample_nearest{count}d" for count in (1, 2, 3)]
        + [f"{kind}_pad{count}d" for kind in ("reflection", "replication") for count in (1, 2)]
        + ["upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d"]
        + ["_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool2d_with_indices"],
        _channels,
    ),
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_shuffle,
    "im2col": _im2col,
    "col2im": _im2col,
    "unfold": _windows,
    "feature_dropout": _channel_dropout,
    "feature_dropout_": _channel_dropout,
}

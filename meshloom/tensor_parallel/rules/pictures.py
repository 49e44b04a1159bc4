"""Pictures: what looks at neighbours stays whole in space, and may be cut by samples and channels (pooling,
resizing, windows)."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.call import Call, Rule
from meshloom.tensor_parallel.rules.factors import Dims, Factors, Product, Term

_FIRST = (frozenset({0}),)


def _channels(call: Call) -> Factors | None:
    """x [b, c, space] -> [b, c, space]: batch and channels may be cut."""
    x = call.operands[0]
    if len(call.operands) != 1 or any(len(out.shape) != len(x.shape) for out in call.outputs):
        return None
    batched = len(x.shape) - _space(call)
    dims: Dims = tuple(f"d{place}" if place < batched else None for place in range(len(x.shape)))
    linear = (frozenset({0}),) if "max" not in call.name else ()
    return Factors(
        operands=(dims,), outputs=(dims,) * len(call.outputs), sizes={f"d{place}": x.shape[place] for place in range(batched)}, linear=linear,
        filled=frozenset(f"d{place}" for place in range(batched)),
    )  # fmt: skip


def _space(call: Call) -> int:
    return next(
        (count for count in (1, 2, 3) if f"{count}d" in call.name),
        2 if "bi" in call.name else 1 if "linear1" in call.name else 3,
    )


def _pixel_shuffle(call: Call) -> Factors | None:
    """x [*, (c r s), h, w] -> [*, c, (h r), (w s)]; pixel_unshuffle is the way back."""
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
        operands=(one,),
        outputs=(other,),
        sizes=sizes,
        whole=frozenset({"r", "s"}),
        filled=frozenset(sizes),
        linear=_FIRST,
    )


def _im2col(call: Call) -> Factors | None:
    """x [b, c, space] -> columns [b, (c kernel), windows]; col2im is the way back."""
    x, out = call.operands[0].shape, call.outputs[0].shape
    image, columns = (out, x) if call.name == "col2im" else (x, out)
    lead: list[Term] = ["b"] if len(columns) == 3 else []
    channels = image[-3]
    sizes = {"c": channels, "k": columns[-2] // channels} | ({"b": image[0]} if lead else {})
    one: Dims = (*lead, "c", None, None)
    other: Dims = (*lead, Product(("c", "k")), None)
    one, other = (other, one) if call.name == "col2im" else (one, other)
    return Factors(
        operands=(one,),
        outputs=(other,),
        sizes=sizes,
        whole=frozenset({"k"}),
        filled=frozenset({"b", "c"} & sizes.keys()),
        linear=_FIRST,
    )


def _windows(call: Call) -> Factors | None:
    """unfold: a dim becomes windows and what is in them; the others may be cut."""
    x = call.operands[0]
    dim = call.dim("dimension", len(x.shape))
    names: Dims = tuple(None if place == dim else f"d{place}" for place in range(len(x.shape)))
    return Factors(
        operands=(names,), outputs=((*names, None),), sizes={f"d{place}": size for place, size in enumerate(x.shape) if place != dim},
        linear=(frozenset({0}),),
    )  # fmt: skip


def _channel_dropout(call: Call) -> Factors | None:
    """dropout1d, 2d, 3d: whole channels are dropped."""
    shape = call.operands[0].shape
    names = tuple(f"d{place}" for place in range(len(shape)))
    return Factors(
        operands=(names,), outputs=(names,), sizes=dict(zip(names, shape, strict=True)), linear=(frozenset({0}),),
        drawn=(*names[:2], *(None,) * (len(shape) - 2)),
    )  # fmt: skip


PICTURES: dict[str, Rule] = {
    **dict.fromkeys(
        [
            f"{kind}_pool{count}d"
            for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
            for count in (1, 2, 3)
        ]
        + [
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d",
            "max_pool2d_with_indices",
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_nearest3d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
        ]
        + [
            "reflection_pad1d",
            "reflection_pad2d",
            "replication_pad1d",
            "replication_pad2d",
            "_upsample_bilinear2d_aa",
        ],
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

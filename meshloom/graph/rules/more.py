"""Operators that leave the first dims alone: pooling, resizing, recurrent networks, windows."""

from __future__ import annotations

from meshloom.graph.rules.call import Call, Operand, Rule
from meshloom.graph.rules.factors import Dims, Factors


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
    return next((count for count in (1, 2, 3) if f"{count}d" in call.name), 2 if "bi" in call.name else 1 if "linear1" in call.name else 3)


def _leading(count_whole: int) -> Rule:
    """The last dims stay whole."""

    def rule(call: Call) -> Factors | None:
        x = call.operands[0]
        if len(call.operands) != 1 or any(out.shape[: len(x.shape) - count_whole] != x.shape[: len(x.shape) - count_whole] for out in call.outputs):
            return None
        lead = len(x.shape) - count_whole
        names = tuple(f"d{place}" for place in range(lead))
        return Factors(
            operands=((*names, *(None,) * count_whole),),
            outputs=tuple((*names, *(None,) * (len(out.shape) - lead)) for out in call.outputs),
            sizes={f"d{place}": x.shape[place] for place in range(lead)},
        )

    return rule


def _spectrum(call: Call) -> Factors | None:
    """fft and its like: the dims that are transformed stay whole."""
    x, out = call.operands[0], call.outputs[0]
    given = call.arguments.get("dim")
    lengths = call.arguments.get("s")
    if given is None or given == ():
        along = set(range(len(x.shape) - (len(lengths) if lengths else len(x.shape)), len(x.shape)))
    else:
        along = set(call.dims("dim", len(x.shape)))
    names: Dims = tuple(None if place in along else f"d{place}" for place in range(len(x.shape)))
    sizes = {f"d{place}": out.shape[place] for place in range(len(x.shape)) if place not in along}
    return Factors(operands=(names,), outputs=(names,), sizes=sizes, linear=(frozenset({0}),))


def _windows(call: Call) -> Factors | None:
    """unfold: a dim becomes windows and what is in them; the others may be cut."""
    x = call.operands[0]
    dim = call.dim("dimension", len(x.shape))
    names: Dims = tuple(None if place == dim else f"d{place}" for place in range(len(x.shape)))
    return Factors(
        operands=(names,), outputs=((*names, None),), sizes={f"d{place}": size for place, size in enumerate(x.shape) if place != dim},
        linear=(frozenset({0}),),
    )  # fmt: skip


def _recurrent(call: Call) -> Factors | None:
    """lstm, gru, rnn: only the batch may be cut. input [t, b, i] or [b, t, i], states [layers, b, h]."""
    x = call.arguments.get("input")
    first = bool(call.arguments.get("batch_first"))
    if not isinstance(x, Operand) or len(x.shape) != 3:
        return None
    place = 0 if first else 1
    dims: Dims = tuple("b" if each == place else None for each in range(3))
    operands: list[Dims] = []
    hidden = call.arguments.get("hx")
    states = {each.number for each in (hidden if isinstance(hidden, tuple) else (hidden,)) if isinstance(each, Operand)}
    for operand in call.operands:
        if operand.number == x.number:
            operands.append(dims)
        elif operand.number in states:
            operands.append((None, "b", None))
        else:
            operands.append((None,) * len(operand.shape))
    outputs: tuple[Dims, ...] = (dims, *((None, "b", None),) * (len(call.outputs) - 1))
    inside = (None, "b", None)  # what is dropped between layers is [t, b, h], whatever the order of the operands
    return Factors(operands=tuple(operands), outputs=outputs, sizes={"b": x.shape[place]}, drawn=inside, filled=frozenset({"b"}))


def _cell(call: Call) -> Factors | None:
    """lstm_cell, gru_cell, ...: input [b, i], states [b, h]; only the batch may be cut."""
    size = call.operands[0].shape[0]
    states = call.arguments["hx"]
    rows = {call.operands[0].number, *(each.number for each in (states if isinstance(states, tuple) else (states,)))}
    operands: tuple[Dims, ...] = tuple(("b", None) if each.number in rows else (None,) * len(each.shape) for each in call.operands)
    return Factors(operands=operands, outputs=(("b", None),) * len(call.outputs), sizes={"b": size})


def _weight_norm(call: Call) -> Factors | None:
    """g v / |v|, the norm taken over all dims but one, which may be cut. v like the result, g 1 in every other dim."""
    v = call.operands[0]
    dim = call.dim("dim", len(v.shape))
    names: Dims = tuple("kept" if place == dim else None for place in range(len(v.shape)))
    return Factors(operands=(names, names), outputs=(names,) * len(call.outputs), sizes={"kept": v.shape[dim]})


def _prelu(call: Call) -> Factors | None:
    x, weight = call.operands
    names = tuple(f"d{place}" for place in range(len(x.shape)))
    slopes: Dims = ("d1",) if len(weight.shape) == 1 and weight.shape[0] != 1 else (None,) * len(weight.shape)
    return Factors(operands=(names, slopes), outputs=(names,), sizes=dict(zip(names, x.shape, strict=True)))


def _embedding_bag(call: Call) -> Factors | None:
    """weight [v, d] -> bags [b, d]: only the columns may be cut."""
    if call.arguments.get("mode") == 2 or len(call.outputs) < 1:
        return None
    operands: tuple[Dims, ...] = ((None, "d"), *((None,) * len(each.shape) for each in call.operands[1:]))
    rest: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.outputs[1:])
    return Factors(operands=operands, outputs=((None, "d"), *rest), sizes={"d": call.operands[0].shape[1]})


def _einsum(call: Call) -> Factors | None:
    equation = str(call.arguments["equation"]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in (*terms, right)):
        return None
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, call.operands, strict=True):
        sizes.update({letter: size for letter, size in zip(term, operand.shape, strict=True) if size != 1 or letter not in sizes})
    operands: tuple[Dims, ...] = tuple(
        tuple(letter if size == sizes[letter] else None for letter, size in zip(term, operand.shape, strict=True))
        for term, operand in zip(terms, call.operands, strict=True)
    )
    return Factors(
        operands=operands, outputs=(tuple(right),), sizes=sizes, sums=frozenset(sizes) - frozenset(right),
        linear=tuple(frozenset({place}) for place in range(len(operands))),
    )  # fmt: skip


def _channel_dropout(call: Call) -> Factors | None:
    """dropout1d, 2d, 3d: whole channels are dropped."""
    shape = call.operands[0].shape
    names = tuple(f"d{place}" for place in range(len(shape)))
    return Factors(
        operands=(names,), outputs=(names,), sizes=dict(zip(names, shape, strict=True)), linear=(frozenset({0}),),
        drawn=(*names[:2], *(None,) * (len(shape) - 2)),
    )  # fmt: skip


MORE: dict[str, Rule] = {
    **dict.fromkeys(
        [f"{kind}_pool{count}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for count in (1, 2, 3)]
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
        + ["reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "_upsample_bilinear2d_aa"],
        _channels,
    ),
    **dict.fromkeys(("tril", "triu"), _leading(2)),
    **dict.fromkeys(("view_as_real",), _leading(0)),
    **dict.fromkeys(("view_as_complex",), _leading(1)),
    **dict.fromkeys([f"fft_{way}{kind}{count}" for way in ("", "i") for kind in ("fft", "rfft") for count in ("", "2", "n")], _spectrum),
    "unfold": _windows,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
    "_weight_norm": _weight_norm,
    "prelu": _prelu,
    "embedding_bag": _embedding_bag,
    "einsum": _einsum,
    "feature_dropout": _channel_dropout,
}

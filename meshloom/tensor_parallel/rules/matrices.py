"""Operators on vectors, matrices or spectra in the last dims, which stay whole: triangles, complex pairs,
Fourier transforms."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.call import Call, Rule
from meshloom.tensor_parallel.rules.factors import Dims, Factors


def _leading(count_whole: int) -> Rule:
    """The last dims stay whole."""

    def rule(call: Call) -> Factors | None:
        x = call.operands[0]
        if len(call.operands) != 1 or any(
            out.shape[: len(x.shape) - count_whole] != x.shape[: len(x.shape) - count_whole]
            for out in call.outputs
        ):
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


MATRICES: dict[str, Rule] = {
    **dict.fromkeys(("tril", "triu"), _leading(2)),
    "view_as_real": _leading(0),
    "view_as_complex": _leading(1),
    **dict.fromkeys(
        [
            f"fft_{way}{kind}{count}"
            for way in ("", "i")
            for kind in ("fft", "rfft")
            for count in ("", "2", "n")
        ],
        _spectrum,
    ),
}

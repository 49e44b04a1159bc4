"""Operators on vectors, matrices or spectra in the last dims, which stay unsharded: triangles, complex pairs,
Fourier transforms."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.call import Call, Rule
from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Factors, labels_except


def _leading(count: int) -> Rule:
    """The last `count` dims stay unsharded."""

    def rule(call: Call) -> Factors | None:
        x = call.operands[0]
        if len(call.operands) != 1 or any(
            out.shape[: len(x.shape) - count] != x.shape[: len(x.shape) - count] for out in call.outputs
        ):
            return None
        lead = len(x.shape) - count
        names, sizes = labels_except(x.shape, range(lead, len(x.shape)))
        return Factors(
            operands=(names,),
            outputs=tuple((*names[:lead], *(None,) * (len(out.shape) - lead)) for out in call.outputs),
            sizes=sizes,
        )

    return rule


def _spectrum(call: Call) -> Factors | None:
    """fft and its variants: the transformed dims stay unsharded."""
    x, out = call.operands[0], call.outputs[0]
    given = call.arguments.get("dim")
    lengths = call.arguments.get("s")
    if given is None or given == ():
        along = set(range(len(x.shape) - (len(lengths) if lengths else len(x.shape)), len(x.shape)))
    else:
        along = set(call.dims("dim", len(x.shape)))
    names, sizes = labels_except(out.shape, along)
    return Factors(operands=(names,), outputs=(names,), sizes=sizes, linear=FIRST_LINEAR)


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

"""Operators on vectors, matrices or spectra in the last dims, which stay unsharded: triangles, complex pairs,
Fourier transforms."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Factors, labels_of
from meshloom.tensor_parallel.rules.operator_call import Call, Rule


def _leading(count: int) -> Rule:
    """The last `count` dims stay unsharded."""

    def rule(call: Call) -> Factors | None:
        shape = call.operands[0].shape
        lead = len(shape) - count
        if len(call.operands) != 1 or any(out.shape[:lead] != shape[:lead] for out in call.outputs):
            return None
        names, sizes = labels_of(shape, range(lead, len(shape)))
        outputs = tuple((*names[:lead], *(None,) * (len(out.shape) - lead)) for out in call.outputs)
        return Factors(operands=(names,), outputs=outputs, sizes=sizes)

    return rule


def _spectrum(call: Call) -> Factors | None:
    """fft and its variants: the transformed dims stay unsharded."""
    x, out = call.operands[0], call.outputs[0]
    along, lengths = call.dims("dim", len(x.shape)), call.arguments.get("s")
    if lengths and call.arguments.get("dim") in (None, ()):
        along = along[-len(lengths) :]
    names, sizes = labels_of(out.shape, along)
    return Factors(operands=(names,), outputs=(names,), sizes=sizes, linear=FIRST_LINEAR)


MATRICES: dict[str, Rule] = {
    **dict.fromkeys(("tril", "triu"), _leading(2)),
    "view_as_real": _leading(0),
    "view_as_complex": _leading(1),
    **dict.fromkeys(
        [f"fft_{way}fft{count}" for way in ("", "i", "r", "ir") for count in ("", "2", "n")], _spectrum
    ),
}

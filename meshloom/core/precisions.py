"""The precisions that a plan can name, as plain values, and the checks of its precision settings.

    float32      as the job is: its own dtypes, and autocast where its loss opens it
    bf16-mixed   losses and metrics under autocast to bfloat16; parameters, gradients and the update as the job has them
    bf16         parameters, activations and gradients are bfloat16; what is updated is float32 copies of them (masters)

What runs a loss in them is `core/losses/in_precision.py`, and `optimizer/bfloat16/` where parameters are lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshloom.core.errors import PlanError
from meshloom.core.plan_text import check_known


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision that a plan can name.

    autocast: name of torch's dtype that losses and metrics are computed in under autocast; "": without one.
    parameters: name of torch's dtype that floating-point parameters, buffers and batches are converted to; "": the job's.
    masters: whether updates are made on copies in the job's own precision.
    """

    autocast: str = ""
    parameters: str = ""
    masters: bool = False


PRECISIONS: Mapping[str, Precision] = {
    "float32": Precision(),
    "bf16-mixed": Precision(autocast="bfloat16"),
    "bf16": Precision(parameters="bfloat16", masters=True),
}


def check_precision(precision: str) -> None:
    """Raise `PlanError` for values that `precision` cannot have."""
    check_known("precision", precision, PRECISIONS)


def check_parameters(precision: str, exchange: str, *, sums: bool) -> None:
    """Raise `PlanError` where parameters of lower precision do not go together with the exchange. sums: whether all replicas
    update with the sum of their gradients."""
    if PRECISIONS[precision].parameters and not sums:
        raise PlanError(
            f"precision={precision} updates the owner's copy of a parameter, and with exchange={exchange} parameters are exchanged or averaged in another way. Use "
            "exchange=all_reduce, or precision=bf16-mixed."
        )

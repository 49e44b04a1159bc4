"""The precisions that a plan can name, as plain values, and the checks of its precision settings.

    float32      as the job is: its own dtypes, and autocast where its loss opens it
    bf16-mixed   losses and metrics under autocast to bfloat16; parameters, gradients and the update as the job has them
    fp16-mixed   the same under autocast to float16, with a loss scale
    bf16         parameters, activations and gradients are bfloat16; what is updated is float32 copies of them (masters)

What runs a loss in them is `core/losses/in_precision.py`, and `optimizer/bfloat16/` where parameters are lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import COMPRESSIONS, ExchangeSettings, compression_of
from meshloom.core.plan_text import check_known


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision that a plan can name.

    autocast: name of torch's dtype that losses and metrics are computed in under autocast; "": without one.
    scaled: whether gradients are those of a scaled loss, as small ones would be lost in that dtype.
    parameters: name of torch's dtype that floating-point parameters, buffers and batches are converted to, of which copies
        in the job's own precision (masters) are kept, and updated; "": the job's.
    """

    autocast: str = ""
    scaled: bool = False
    parameters: str = ""


PRECISIONS: Mapping[str, Precision] = {
    "float32": Precision(),
    "bf16-mixed": Precision(autocast="bfloat16"),
    "fp16-mixed": Precision(autocast="float16", scaled=True),
    "bf16": Precision(parameters="bfloat16"),
}

# Precisions of earlier versions, with what to write instead.
_GONE = {"bf16-stochastic": "Use bf16 (masters in float32) with zero=1, or bf16-mixed."}


class PrecisionSettings(ExchangeSettings, Protocol):
    """The settings of a plan that are checked here."""

    @property
    def precision(self) -> str: ...


def check_precision(plan: PrecisionSettings) -> None:
    """Raise `PlanError` for values that `precision` cannot have, and for what cannot go together with it."""
    check_known("precision", plan.precision, PRECISIONS, _GONE)
    if not PRECISIONS[plan.precision].scaled:
        return
    if plan.exchange == "async":
        raise PlanError(
            f"precision={plan.precision} skips a step on all ranks when the gradients of one overflow, and with exchange=async no two ranks take a step together. "
            "Use another exchange, or precision=bf16-mixed."
        )
    if compression_of(plan)[0].remembers:
        others = " or ".join(name for name, each in COMPRESSIONS.items() if not each.remembers)
        raise PlanError(
            f"compress={plan.compress} adds to a step what it did not send of earlier ones, and with precision={plan.precision} these may have overflowed. "
            f"Use compress={others}, or precision=bf16-mixed."
        )


def check_parameters(precision: str, exchange: str, *, sums: bool) -> None:
    """Raise `PlanError` where parameters of lower precision do not go together with the exchange. sums: whether all replicas
    update with the sum of their gradients."""
    if PRECISIONS[precision].parameters and not sums:
        raise PlanError(
            f"precision={precision} updates the owner's copy of a parameter, and with exchange={exchange} parameters are exchanged or averaged in another way. Use "
            "exchange=all_reduce, or precision=bf16-mixed."
        )

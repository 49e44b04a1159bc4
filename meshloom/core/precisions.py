"""The precisions that a plan can name, as plain values, and the checks of its precision settings.

    float32      as the job is: its own dtypes, and autocast where its loss opens it
    bf16-mixed   losses and metrics under autocast to bfloat16; parameters, gradients and the update as the job has them

What runs a loss in them is `core/losses/in_precision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshloom.core.plan_text import check_known


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision that a plan can name.

    autocast: name of torch's dtype that losses and metrics are computed in under autocast; "": without one.
    """

    autocast: str = ""


PRECISIONS: Mapping[str, Precision] = {
    "float32": Precision(),
    "bf16-mixed": Precision(autocast="bfloat16"),
}


def check_precision(precision: str) -> None:
    """Raise `PlanError` for values that `precision` cannot have."""
    check_known("precision", precision, PRECISIONS)

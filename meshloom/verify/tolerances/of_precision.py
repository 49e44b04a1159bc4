"""How far two right results of one precision may be apart, before rounding is measured and at most."""

from __future__ import annotations

import torch

from meshloom.core.plan import Plan

# The largest error that is ever put down to rounding, if rounding is measured to be as large. In float64 and float32
# correct runs stay well below (tests/test_verify.py), and the smallest relevant mistakes are above (a mean of means
# over 17, 17, 16 and 16 samples is off by about 1e-2).
_MOST = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Units in the last place by which sums of a few chunks and products of long rows differ in another order.
_UNITS = 32
# Values that pass through a whole model, such as a loss, gather more.
_UNITS_THROUGH = 128


def most_tolerated(dtype: torch.dtype | None) -> float:
    """Of what is computed in this precision in other orders or pieces; None: 0."""
    return 0.0 if dtype is None else _MOST.get(dtype, 0.5)


def unmeasured(dtype: torch.dtype) -> float:
    """The error of a tensor, relative to its norm, that needs no measuring."""
    return min(_UNITS * torch.finfo(dtype).eps, most_tolerated(dtype))


def unmeasured_through(dtype: torch.dtype) -> float:
    """The same of a value that the whole model, or an optimizer's step, leads to."""
    return min(_UNITS_THROUGH * torch.finfo(dtype).eps, most_tolerated(dtype))


def sums_in_other_orders(plan: Plan) -> bool:
    """Whether gradients that one device adds up chunk by chunk are added up in another order; along pp also those of a
    parameter that several stages use, stage by stage."""
    return plan.num_chunks > 2 or (plan.num_chunks > 1 and plan.pp > 1)

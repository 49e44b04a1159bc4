"""Whether the replicas of a host may have one copy of the parameters, or whether the job needs one each."""

from __future__ import annotations

from meshloom.core.exchanges import EXCHANGES
from meshloom.core.job import NamedParameters
from meshloom.core.plan import Plan
from meshloom.optimizer.reach import added_to
from meshloom.optimizer.user_optimizer import UserOptimizers, reach_in_words


def shares_copies(plan: Plan) -> bool:
    """Whether the plan's exchange can have one copy of the parameters for several replicas."""
    return plan.dp > 1 and EXCHANGES[plan.exchange].sums and plan.compress == "none" and plan.reduce == "own"


def why_separate(made: UserOptimizers, named_parameters: NamedParameters) -> str:
    """Why every replica needs parameters of its own; "" if it does not.

    With one copy a rank's optimizer updates slices of parameters, while other ranks update other slices of
    the same.
    """
    if (optimizer := made.looks_at_all) is not None:
        return reach_in_words(optimizer)[0]
    for optimizer in made.optimizers:
        if added := added_to(optimizer):
            return f"{type(optimizer).__name__} has {added}, which may look at whole parameters"
    for name, parameter in named_parameters:
        if not parameter.is_contiguous():
            return f"{name} is not contiguous in memory"
    return ""

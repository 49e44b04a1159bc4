"""What a plan makes of a published model, found as `meshloom describe --plan` finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshloom.core.mesh import AXES
from meshloom.core.plan import Plan
from meshloom.planner.divided import divided
from meshloom.planner.ranks import shares_of
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import staged
from meshloom.tensor_parallel.explain import Undivided
from tests.published.model import Published

PLANS = ("tp=4", "tp=8", "pp=4,microbatches=8", "dp=2,pp=2,tp=2,microbatches=8")
HUGE = "dp=8,pp=8,tp=8,microbatches=8"


@dataclass(frozen=True, kw_only=True)
class Row:
    """parameters, flops: the shares that are divided, 0 without tp. whole: what is not.

    num_bytes: axis -> bytes that the rank which sends most hands over in a step. memory: bytes of the rank
        that holds most.
    """

    plan: str
    parameters: float
    flops: float
    whole: tuple[Undivided, ...]
    num_bytes: Mapping[str, int]
    memory: int


class Rows:
    """Of one model, which is read once for all plans."""

    def __init__(self, model: Published) -> None:
        self._model = model
        self._readings = Readings(model.job(1))
        self.num_operators = len(self._readings.of(model.chunk).program.nodes)

    def row(self, text: str) -> Row:
        """Under a plan, of batches of as many chunks as it has."""
        plan, readings = Plan.parse(text), self._readings
        batch_size = plan.num_chunks * self._model.chunk
        division = divided(readings, plan, batch_size=batch_size) if plan.tp > 1 else None
        stages = staged(readings, plan, batch_size=batch_size, offers=False) if plan.pp > 1 else None
        shares = shares_of(readings, plan, division, stages, batch_size=batch_size)
        account = division.account if division else None
        return Row(
            plan=text,
            parameters=account.parameters_divided if account else 0.0,
            flops=account.flops_divided if account else 0.0,
            whole=account.whole if account else (),
            num_bytes={
                axis: most for axis in AXES if (most := max(each.num_bytes.get(axis, 0) for each in shares))
            },
            memory=max(each.held.total for each in shares),
        )


def plans_of(model: Published) -> tuple[str, ...]:
    """Those that the model is described under."""
    return (*PLANS, HUGE) if model.huge else PLANS

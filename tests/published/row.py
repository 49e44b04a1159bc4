"""One line of the table: what a plan makes of a published model, found as `meshloom describe --plan` finds
it."""

from __future__ import annotations

import time
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
    imbalance: of the slowest stage over the mean. seconds: of one core, for reading the model and for the
        plan.
    """

    plan: str
    parameters: float
    flops: float
    whole: tuple[Undivided, ...]
    num_bytes: Mapping[str, int]
    memory: int
    imbalance: float | None
    seconds: tuple[float, float]

    def cells(self) -> list[str]:
        """As text, but for the seconds."""
        tp = "tp=" in self.plan
        shares = [f"{self.parameters:.1%}", f"{self.flops:.1%}"] if tp else ["", ""]
        sent = [with_one_decimal(self.num_bytes[axis]) if axis in self.num_bytes else "" for axis in AXES]
        balance = "" if self.imbalance is None else f"{self.imbalance:.1%}"
        return [self.plan, *shares, *sent, with_one_decimal(self.memory), balance]


class Rows:
    """Of one model, which is read once for all plans."""

    def __init__(self, model: Published) -> None:
        self._model = model
        self._readings = Readings(model.job(1))
        started = time.process_time()
        self.num_operators = len(self._readings.of(model.chunk).program.nodes)
        self._seconds = time.process_time() - started

    def row(self, text: str) -> Row:
        """Under a plan, of batches of as many chunks as it has."""
        started = time.process_time()
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
            imbalance=stages.choice.imbalance if stages else None,
            seconds=(self._seconds, time.process_time() - started),
        )


def with_one_decimal(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is one, up to GiB, as the table writes them.

    >>> with_one_decimal(10035), with_one_decimal(5 * 2**40)
    ('9.8 KiB', '5120.0 GiB')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def plans_of(model: Published) -> tuple[str, ...]:
    """Those that the model is described under."""
    return (*PLANS, HUGE) if model.huge else PLANS

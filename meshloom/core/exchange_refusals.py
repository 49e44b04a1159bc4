"""What a job asks for and some exchanges and precisions do not have."""

from __future__ import annotations

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS


def check_exchange(job: Job, plan: Plan) -> None:
    """Raises `PlanError` for plans under which evaluations decide nothing."""
    if (
        job.evaluate
        and (job.evaluate.best or job.evaluate.scheduler)
        and not EXCHANGES[plan.exchange].synchronous
    ):
        raise PlanError(
            f"exchange={plan.exchange} evaluates snapshots while workers go on, and keeps no best one: Evaluate(best=..., patience=..., scheduler=...) are for "
            "ranks that step together. Leave them out, or use another exchange."
        )


def check_averages(exchange: str, precision: str) -> None:
    """Raises `PlanError` for those of a plan under which parameters have no averages."""
    why = ""
    if exchange != "all_reduce":
        why = f"exchange={exchange}, where replicas have parameters of their own or none"
    elif PRECISIONS[precision].parameters:
        why = f"precision={precision}, whose digits are too few for them"
    if why:
        raise PlanError(f"ml.Averaged keeps no averages with {why}. Leave one of them out.")

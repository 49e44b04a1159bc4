"""What a job asks for and some exchanges and precisions do not have."""

from __future__ import annotations

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS


def check_exchange(job: Job, plan: Plan) -> None:
    """Raises `PlanError` for plans under which evaluations decide nothing, or parameters have no average."""
    if (
        job.evaluate
        and (job.evaluate.best or job.evaluate.scheduler)
        and not EXCHANGES[plan.exchange].synchronous
    ):
        raise PlanError(
            f"exchange={plan.exchange} evaluates snapshots while workers go on, and keeps no best one: Evaluate(best=..., patience=..., scheduler=...) are for "
            "ranks that step together. Leave them out, or use another exchange."
        )
    if job.average is not None and (why := _no_average(plan)):
        raise PlanError(f"Job(average=...) is not kept {why}. Leave one of them out.")


def _no_average(plan: Plan) -> str:
    if plan.exchange != "all_reduce":
        return f"with exchange={plan.exchange}, where replicas have parameters of their own or none"
    if PRECISIONS[plan.precision].parameters:
        return f"with precision={plan.precision}, whose digits are too few for it"
    return ""

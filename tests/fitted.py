"""A job trained to its end, for the tests that ask what is there afterwards."""

from __future__ import annotations

from typing import Any

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer


def fitted(job: Job, plan: str | Plan, **settings: Any) -> Any:
    """The summary of a run, on simulated ranks unless the settings of its Trainer say otherwise."""
    with Trainer(job, plan, **{"devices": "simulated", **settings}) as trainer:
        return trainer.fit()

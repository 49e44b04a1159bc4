"""Job files whose models are to be described, for tests of the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.test_describe import Stack, job_of

job = job_of(Stack)


def _deciding(model: Any, batch: Any) -> Tensor:
    """What runs depends on values, outside of all modules."""
    loss = job.loss(model, batch)
    total: Any = loss[0] if isinstance(loss, tuple) else loss
    return total if total > 0 else -total


branching = replace(job, loss=_deciding)

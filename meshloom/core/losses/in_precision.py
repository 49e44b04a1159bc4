"""Losses and metrics in the precision of a plan: the one place that opens autocast for them.

What runs a loss as it is, and what captures it as a program, is given the job that `in_precision` returns. The nodes of
a program have the autocast regions of its loss, so nothing else need know of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job, LossFunction
from meshloom.core.job_functions import Loss
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS


def in_precision(job: Job, plan: Plan) -> Job:
    """The job with its loss and metrics in the plan's precision; a job that has them so already is itself.

    >>> job = Job(model=nn.Module, loss=lambda model, x: x @ x, optimizer=torch.optim.SGD, data=list, batch_size=1, steps=1)
    >>> in_precision(job, Plan(precision="bf16-mixed")).loss(nn.Module(), torch.tensor([[1.001]]))
    tensor([[1.]], dtype=torch.bfloat16)
    >>> in_precision(job, Plan()) is job
    True
    """
    name = PRECISIONS[plan.precision].autocast
    if not name or (isinstance(job.loss, partial) and job.loss.func is _under_autocast):
        return job
    dtype: torch.dtype = getattr(torch, name)
    if job.evaluate:
        job = replace(job, evaluate=job.evaluate.with_functions(lambda metric: partial(_under_autocast, metric, dtype)))  # fmt: skip
    return replace(job, loss=partial(_under_autocast, job.loss, dtype))


def _under_autocast(loss: LossFunction, dtype: torch.dtype, model: Any, batch: Any) -> Loss:
    where = _device_type(model, batch)
    try:
        with torch.autocast(where, dtype=dtype):
            return loss(model, batch)
    except RuntimeError as error:  # also NotImplementedError
        if not any(sign in str(error) for sign in _NO_KERNEL):
            raise
        name, said = str(dtype).removeprefix("torch."), str(error).splitlines()[0].split(". ")[0]
        raise JobError(
            f"An operator of the loss has no {name} kernel on {where} ({said}). Call it within torch.autocast({where!r}, enabled=False) on tensors in float32, or use "
            "another precision."
        ) from error


# what torch says where a kernel is missing: its own, and oneDNN's
_NO_KERNEL = ("not implemented for 'Half'", "not implemented for 'BFloat16'", "could not create a primitive")


def _device_type(model: nn.Module, batch: Any) -> str:
    """Where the loss is computed: where the model's values are."""
    tensors = (each for each in (*model.parameters(), *model.buffers()) if not each.is_meta)
    first = next(tensors, batch)
    return first.device.type if isinstance(first, Tensor) else "cpu"

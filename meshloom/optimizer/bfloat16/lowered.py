"""A job whose model's floating-point parameters and buffers, and floating-point batches, are of a lower precision; but for
normalization layers with running statistics.

What runs a loss as it is, and what captures it as a program, is given the job that `lowered` returns, so programs,
sizes and costs are those of the lower precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from meshloom.core.job import Job, LossFunction, NamedParameters
from meshloom.core.job_functions import Loss
from meshloom.core.modules.built import built
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS
from meshloom.data.to_device import convert_tensors
from meshloom.program.trace.precision import in_precision

OptimizerFunction = Callable[[NamedParameters], Optimizer | list[Optimizer]]


def lowered(job: Job, plan: Plan, instead: torch.dtype | None = None) -> Job:
    """The job with parameters of the plan's precision; one that has them so already is itself. instead: in which all is computed
    for verification.

    >>> job = Job(model=lambda: nn.Linear(2, 1), loss=nn.Module, optimizer=torch.optim.SGD, data=list, batch_size=1, steps=1)
    >>> lowered(job, Plan(precision="bf16")).model().weight.dtype
    torch.bfloat16
    >>> lowered(job, Plan(precision="bf16-mixed")) is job
    True
    """
    precision = PRECISIONS[plan.precision]
    if instead is not None or not precision.parameters or own_model(job) is not job.model:
        return job
    dtype: torch.dtype = getattr(torch, precision.parameters)
    job = replace(job, model=partial(_built, job.model, dtype))
    if job.evaluate:
        job = replace(
            job, evaluate=job.evaluate.with_functions(lambda metric: partial(_of_batch, metric, dtype))
        )
    return replace(
        job, loss=partial(_of_batch, job.loss, dtype), optimizer=partial(_on_copies, job.optimizer)
    )


def own_model(job: Job) -> Callable[[], nn.Module]:
    """The job's model function as the user wrote it."""
    function = job.model
    return function.args[0] if isinstance(function, partial) and function.func is _built else function


def has_masters(optimizer: OptimizerFunction) -> bool:
    """Whether an optimizer function of a job updates float32 copies of its parameters."""
    return isinstance(optimizer, partial) and optimizer.func is _on_copies


def _built(function: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    model = built(function)
    layers = [each for each in model.modules() if _has_statistics(each)]
    tensors = (each for layer in layers for each in (*layer.parameters(), *layer.buffers()))
    convert_tensors(model, dtype, {id(each) for each in tensors})
    return model


def _has_statistics(module: nn.Module) -> bool:
    """Whether it is a normalization layer with running statistics, which a step changes by less than a digit of bfloat16;
    its kernels take inputs in bfloat16 beside parameters and statistics in float32."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def _of_batch(loss: LossFunction, dtype: torch.dtype, model: Any, batch: Any) -> Loss:
    return loss(model, in_precision(batch, dtype))


def _on_copies(function: OptimizerFunction, named: NamedParameters) -> Optimizer | list[Optimizer]:
    """`named` are float32 copies."""
    return function(named)

"""The metrics of a job on one device: all of its evaluation data, chunk after chunk, in evaluation mode."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshloom.core.moments.current_step import at_step
from meshloom.core.random import (
    KeyedDraws,
    derive,
    evaluation_seed,
    preserved_draws,
    sample_seed,
    seed_everything,
)
from meshloom.verify.reference.chunks_of_plan import forwards_of
from meshloom.verify.reference.other_precision import convert, default_dtype
from meshloom.verify.reference.reference import Reference


def evaluate(reference: Reference, updates: int, batches: int | None = None) -> dict[str, float]:
    """The mean of every metric after `updates` updates; nan where there is no weight. batches: so many of the data alone.

    Nothing of the reference changes: modules are put into evaluation mode and back, and metrics run without gradients.
    """
    assert reference.job.evaluate is not None
    sums = {name: [0.0, 0.0] for name in reference.job.evaluate.metrics}
    modes = [(module, module.training) for module in reference.model.modules()]
    with preserved_draws(), torch.no_grad():
        seed_everything(derive(reference.job.seed, "data"))
        dataset = reference.job.evaluate.data()
        reference.model.eval()
        with default_dtype(reference.dtype):
            _run(reference, dataset, sums, updates, batches)
        for module, training in modes:
            module.training = training
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


def _run(
    reference: Reference, dataset: Any, sums: dict[str, list[float]], updates: int, batches: int | None
) -> None:
    job = reference.job
    size = job.evaluation_batch_size
    for batch, start in enumerate(range(0, len(dataset), size)[:batches]):
        samples: list[Any] = []
        for index in range(start, min(start + size, len(dataset))):
            seed_everything(sample_seed(job.seed, -1, index))  # -1: the epoch of evaluations
            samples.append(dataset[index])
        for chunk in forwards_of(reference.plan, samples, reference.shares_now, synchronised=False):
            _add(reference, sums, batch, chunk.members[0][0], chunk.samples, updates)


def _add(
    reference: Reference, sums: dict[str, list[float]], batch: int, chunk: int, samples: Any, updates: int
) -> None:
    """Add every metric of one chunk."""
    job, device = reference.job, reference.device
    assert job.evaluate is not None
    seed_everything(derive(job.seed, "collate", batch, chunk))
    collated = (job.collate or default_collate)(list(samples))
    data = convert(collated, device, reference.dtype or reference.updated.dtype)
    lower = reference.autocast
    seed = evaluation_seed(job.seed, batch, chunk)
    for name, metric in job.evaluate.metrics.items():
        seed_everything(seed)
        with (
            at_step(updates),
            KeyedDraws() if reference.plan.captures else nullcontext(),
            torch.autocast(device.type, lower, enabled=lower is not None),
        ):
            returned = metric(reference.model, data)
        value, weight = returned if isinstance(returned, tuple) else (returned, None)
        if isinstance(value, Tensor) and value.dtype == torch.float16:
            value = value.float()  # whose largest number is 65504
        sums[name][0] += float(value if weight is not None else value * len(samples))
        sums[name][1] += float(weight) if weight is not None else len(samples)

"""The metrics of a job on one device: all of its evaluation data, chunk after chunk, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from meshloom.verify.reference.buffer_merging import plain_numbers, put_numbers
from meshloom.verify.reference.chunks_of_plan import forwards_of
from meshloom.verify.reference.other_precision import convert, default_dtype
from meshloom.verify.reference.reference import Reference


@dataclass(frozen=True, kw_only=True)
class EvaluatedChunk:
    """The sum and weight of every metric of one chunk of one batch."""

    batch: int
    chunk: int
    sums: Mapping[str, tuple[float, float]]


def evaluate(reference: Reference, updates: int, batches: int | None = None) -> dict[str, float]:
    """The mean of every metric after `updates` updates; nan where there is no weight. batches: so many of the data alone."""
    return means_of(evaluated_chunks(reference, updates, batches))


def means_of(chunks: Sequence[EvaluatedChunk]) -> dict[str, float]:
    """Of every metric; nan where there is no weight."""
    found: dict[str, float] = {}
    for name in chunks[0].sums if chunks else ():
        total, weight = map(sum, zip(*(each.sums[name] for each in chunks), strict=True))
        found[name] = total / weight if weight else math.nan
    return found


def evaluated_chunks(
    reference: Reference, updates: int, batches: int | None = None, *, training: bool = False
) -> list[EvaluatedChunk]:
    """Every chunk after `updates` updates. batches: so many of the data alone. training: with modules in training mode, which would be wrong.

    Nothing of the reference changes: modules are put into evaluation mode and back, and metrics run without gradients.
    """
    assert reference.job.evaluate is not None
    modes = [(module, module.training) for module in reference.model.modules()]
    buffers = [(each, each.clone()) for each in reference.model.buffers()] if training else []
    with preserved_draws(), torch.no_grad():
        seed_everything(derive(reference.job.seed, "data"))
        dataset = reference.job.evaluate.data()
        reference.model.train(training)
        with default_dtype(reference.dtype):
            found = list(_run(reference, dataset, updates, batches))
        for module, was in modes:
            module.training = was
        for buffer, value in buffers:
            buffer.copy_(value)
    return found


def _run(reference: Reference, dataset: Any, updates: int, batches: int | None) -> Iterator[EvaluatedChunk]:
    job = reference.job
    size = job.evaluation_batch_size
    for batch, start in enumerate(range(0, len(dataset), size)[:batches]):
        samples: list[Any] = []
        for index in range(start, min(start + size, len(dataset))):
            seed_everything(sample_seed(job.seed, -1, index))  # -1: the epoch of evaluations
            samples.append(dataset[index])
        for chunk in forwards_of(reference.plan, samples, reference.shares_now, synchronised=False):
            number = chunk.members[0][0]
            sums = dict(_sums(reference, batch, number, chunk.samples, updates))
            yield EvaluatedChunk(batch=batch, chunk=number, sums=sums)


def _sums(
    reference: Reference, batch: int, chunk: int, samples: Any, updates: int
) -> Iterator[tuple[str, tuple[float, float]]]:
    """The sum and weight of every metric of one chunk."""
    job, device = reference.job, reference.device
    assert job.evaluate is not None
    seed_everything(derive(job.seed, "collate", batch, chunk))
    collated = (job.collate or default_collate)(list(samples))
    data = convert(collated, device, reference.dtype or reference.updated.dtype)
    lower, numbers = reference.autocast, plain_numbers(reference.model)
    seed = evaluation_seed(job.seed, batch, chunk)
    for name, metric in job.evaluate.metrics.items():
        seed_everything(seed)
        reference.chunk_run.left.put(None)
        with (
            at_step(updates),
            KeyedDraws() if reference.plan.captures else nullcontext(),
            torch.autocast(device.type, lower, enabled=lower is not None),
        ):
            returned = metric(reference.model, data)
        put_numbers(reference.model, numbers)
        value, weight = returned if isinstance(returned, tuple) else (returned, None)
        if isinstance(value, Tensor) and value.dtype == torch.float16:
            value = value.float()  # whose largest number is 65504
        total = float(value if weight is not None else value * len(samples))
        yield name, (total, float(weight) if weight is not None else float(len(samples)))

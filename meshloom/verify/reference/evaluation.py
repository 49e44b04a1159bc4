"""The metrics of a job on one device: all of its evaluation data, chunk after chunk, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import CODE_ERRORS
from meshloom.core.job_functions import Metric
from meshloom.core.modules.held_generators import held_generators
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
from meshloom.verify.reference.samples_of_epoch import seed_reading
from meshloom.verify.reference.state_before import StateBefore


def evaluate(reference: Reference, updates: int, batches: int | None = None) -> dict[str, float]:
    """The mean of every metric after `updates` updates, and of a `Metric` what it computes of all samples; nan where there is no weight, or it cannot.
    batches: so many of the data alone.

    Nothing of the reference changes: modules are put into evaluation mode and back, and metrics run without gradients.
    """
    job = reference.job
    assert job.evaluate is not None
    metrics = job.evaluate.metrics
    found: dict[str, list[Any]] = {name: [] for name in metrics}
    with _evaluating(reference) as (dataset, before):
        for batch, chunk, samples in _chunks(reference, dataset, batches):
            collated = reference.chunk_run.collate(samples, batch, chunk)
            data = convert(collated, reference.device, reference.dtype or reference.updated.dtype)
            for name, metric in metrics.items():
                value = _returned(reference, batch, chunk, data, metric, updates)
                found[name].append(value if isinstance(metric, Metric) else _sum(value, len(samples)))
                before.put_back()
    return {name: _of_all(metric, found[name], reference.dtype) for name, metric in metrics.items()}


def _of_all(metric: Any, found: Sequence[Any], dtype: torch.dtype | None) -> float:
    """Of what a metric has given for all chunks."""
    if isinstance(metric, Metric):
        with suppress(*CODE_ERRORS), default_dtype(dtype):
            return _computed(metric.compute, found)
        return math.nan
    total, weight = (sum(each[place] for each in found) for place in (0, 1))
    return total / weight if weight else math.nan


def _computed(compute: Any, returned: Sequence[Any]) -> float:
    """Of all samples."""
    first = returned[0]
    if isinstance(first, dict):
        value = compute(**{name: _joined(each[name] for each in returned) for name in first})
    elif isinstance(first, tuple | list):
        value = compute(*(_joined(each[number] for each in returned) for number in range(len(first))))
    else:
        value = compute(_joined(returned))
    value = float(value)
    if hasattr(compute, "reset"):
        compute.reset()
    return value


def _joined(parts: Iterable[Tensor]) -> Tensor:
    whole = torch.cat([each.cpu() for each in parts])
    return whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole


@contextmanager
def _evaluating(reference: Reference) -> Iterator[tuple[Any, StateBefore]]:
    """A context of metrics, at whose end nothing has changed; yields the evaluation data, and what is to be put back after each metric."""
    assert reference.job.evaluate is not None
    modes = [(module, module.training) for module in reference.model.modules()]
    with preserved_draws(), torch.no_grad():
        seed_everything(derive(reference.job.seed, "data"))
        dataset = reference.job.evaluate.data()
        reference.model.eval()
        before = StateBefore(reference.model)
        # torch scales the rows that are looked up in the weight itself, in evaluations too, and a run does not
        scaled = [each for each in reference.model.modules() if getattr(each, "max_norm", None) is not None]
        tables = [(each.weight, each.weight.clone()) for each in scaled if isinstance(each.weight, Tensor)]
        try:
            with default_dtype(reference.dtype):
                yield dataset, before
        finally:
            before.put_back()
            for table, value in tables:
                table.copy_(value)
            for module, was in modes:
                module.training = was


def _chunks(
    reference: Reference, dataset: Any, batches: int | None
) -> Iterator[tuple[int, int, Sequence[Any]]]:
    """Number of the batch, of the chunk, and its samples. batches: of so many alone; None: of all."""
    job = reference.job
    size, held = job.evaluation_batch_size, held_generators(dataset)
    for batch, start in enumerate(range(0, len(dataset), size)):
        if batch == batches:
            return
        samples: list[Any] = []
        for index in range(start, min(start + size, len(dataset))):
            seed_reading(held, sample_seed(job.seed, -1, index))  # -1: the epoch of evaluations
            samples.append(dataset[index])
        for chunk in forwards_of(reference.plan, samples, reference.shares_now, synchronised=False):
            yield batch, chunk.members[0][0], chunk.samples


def _returned(reference: Reference, batch: int, chunk: int, data: Any, metric: Any, updates: int) -> Any:
    """What a metric's function returns for a chunk."""
    lower = reference.autocast
    seed = evaluation_seed(reference.job.seed, batch, chunk)
    reference.chunk_run.seed(seed)
    with (
        at_step(updates),
        reference.chunk_run.leaves_of(seed),
        KeyedDraws() if reference.chunk_run.keys_metrics else nullcontext(),
        torch.autocast(reference.device.type, lower, enabled=lower is not None),
    ):
        return (metric.update if isinstance(metric, Metric) else metric)(reference.model, data)


def _sum(returned: Any, num_samples: int) -> tuple[float, float]:
    """The sum and weight that a chunk adds to a mean."""
    value, weight = returned if isinstance(returned, tuple) else (returned, None)
    if isinstance(value, Tensor) and value.dtype == torch.float16:
        value = value.float()  # whose largest number is 65504
    total = float(value if weight is not None else value * num_samples)
    return total, float(weight) if weight is not None else float(num_samples)

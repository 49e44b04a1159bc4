"""The metrics of a job on one device: all of its evaluation data, chunk after chunk, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshloom.core.modules.held_generators import held_generators
from meshloom.core.moments.current_step import at_step
from meshloom.core.objectives import Metric
from meshloom.core.random import (
    KeyedDraws,
    derive,
    evaluation_seed,
    preserved_draws,
    sample_seed,
    seed_everything,
)
from meshloom.verify.reference.between_chunks.state_before import StateBefore
from meshloom.verify.reference.chunk_run import collated
from meshloom.verify.reference.chunks_of_plan import forwards_of
from meshloom.verify.reference.observers import digest_values
from meshloom.verify.reference.other_precision import convert, default_dtype
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.samples_of_epoch import seed_reading


@dataclass(frozen=True, kw_only=True)
class EvaluatedChunk:
    """The sum and weight of every metric of one chunk of one batch; of a `Metric` a number in which every element counts, and samples. data: digest
    of its batch; "": not asked for. seed: from which metrics draw. returned: by
    `Metric`, on one device, what computes it of all samples and what its `update` returned."""

    batch: int
    chunk: int
    sums: Mapping[str, tuple[float, float]]
    data: str = ""
    seed: int = 0
    returned: Mapping[str, tuple[Callable[..., float], Any]] = field(default_factory=dict[str, tuple[Callable[..., float], Any]])  # fmt: skip


def evaluate(reference: Reference, updates: int, batches: int | None = None) -> dict[str, float]:
    """The mean of every metric after `updates` updates; nan where there is no weight. batches: so many of the data alone."""
    return means_of(evaluated_chunks(reference, updates, batches))


def means_of(chunks: Sequence[EvaluatedChunk]) -> dict[str, float]:
    """Of every metric; nan where there is no weight. Of a `Metric` what it computes of all samples; nan if it cannot."""
    found: dict[str, float] = {}
    for name in chunks[0].sums if chunks else ():
        if name in chunks[0].returned:
            found[name] = math.nan
            with suppress(Exception):
                found[name] = _computed([each.returned[name] for each in chunks])
            continue
        total, weight = map(sum, zip(*(each.sums[name] for each in chunks), strict=True))
        found[name] = total / weight if weight else math.nan
    return found


def _computed(returned: Sequence[tuple[Callable[..., float], Any]]) -> float:
    """Of all samples."""
    compute, first = returned[0]
    if isinstance(first, dict):
        return compute(**{name: _joined(each[name] for _, each in returned) for name in first})
    if isinstance(first, tuple | list):
        return compute(*(_joined(each[number] for _, each in returned) for number in range(len(first))))
    return compute(_joined(each for _, each in returned))


def _joined(parts: Iterable[Tensor]) -> Tensor:
    whole = torch.cat([each.cpu() for each in parts])
    return whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole


def _compute(function: Any, dtype: torch.dtype | None, *arguments: Tensor, **named: Tensor) -> float:
    """What `Metric.compute` makes of all samples, where new numbers are of this dtype."""
    with default_dtype(dtype):
        value = float(function(*arguments, **named))
    if hasattr(function, "reset"):
        function.reset()
    return value


def evaluated_chunks(
    reference: Reference, updates: int, batches: int | None = None, *, digests: bool = False
) -> list[EvaluatedChunk]:
    """Every chunk after `updates` updates. batches: so many of the data alone. digests: whether those of the data are wanted.

    Nothing of the reference changes: modules are put into evaluation mode and back, and metrics run without gradients.
    """
    found: list[EvaluatedChunk] = []
    metrics = _metrics(reference)
    with _evaluating(reference) as (dataset, before):
        for batch, chunk, samples in _chunks(reference, dataset, batches):
            given = _collated(reference, batch, chunk, samples)
            data, digest = _converted(reference, given), digest_values(given) if digests else ""
            sums: dict[str, tuple[float, float]] = {}
            returned: dict[str, tuple[Callable[..., float], Any]] = {}
            for name, metric in metrics.items():
                value = _returned(reference, batch, chunk, data, name, updates)
                sums[name] = _sums(value, len(samples), metric)
                if isinstance(metric, Metric):
                    returned[name] = partial(_compute, metric.compute, reference.dtype), value
                before.put_back()
            seed = evaluation_seed(reference.job.seed, batch, chunk)
            found.append(EvaluatedChunk(batch=batch, chunk=chunk, sums=sums, data=digest, seed=seed, returned=returned))  # fmt: skip
    return found


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


def _metrics(reference: Reference) -> Mapping[str, Any]:
    assert reference.job.evaluate is not None
    return reference.job.evaluate.metrics


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


def _collated(reference: Reference, batch: int, chunk: int, samples: Sequence[Any]) -> Any:
    seed_everything(derive(reference.job.seed, "collate", batch, chunk))
    return collated(reference.job, samples)


def _converted(reference: Reference, collated: Any) -> Any:
    return convert(collated, reference.device, reference.dtype or reference.updated.dtype)


def _returned(reference: Reference, batch: int, chunk: int, data: Any, metric: str, updates: int) -> Any:
    """What a metric's function returns for a chunk."""
    lower, function = reference.autocast, _metrics(reference)[metric]
    seed = evaluation_seed(reference.job.seed, batch, chunk)
    reference.chunk_run.seed(seed)
    with (
        at_step(updates),
        reference.chunk_run.leaves_of(seed),
        KeyedDraws() if reference.plan.captures else nullcontext(),
        torch.autocast(reference.device.type, lower, enabled=lower is not None),
    ):
        return (function.update if isinstance(function, Metric) else function)(reference.model, data)


def _sums(returned: Any, num_samples: int, metric: Any) -> tuple[float, float]:
    """The sum and weight that it adds."""
    if isinstance(metric, Metric):
        tensors = list(returned.values()) if isinstance(returned, dict) else returned
        tensors = list(tensors) if isinstance(tensors, tuple | list) else [tensors]
        return sum((1 + number) * _weighted(each) for number, each in enumerate(tensors)), float(num_samples)
    value, weight = returned if isinstance(returned, tuple) else (returned, None)
    if isinstance(value, Tensor) and value.dtype == torch.float16:
        value = value.float()  # whose largest number is 65504
    total = float(value if weight is not None else value * num_samples)
    return total, float(weight) if weight is not None else float(num_samples)


def _weighted(tensor: Tensor) -> float:
    """Means of samples, added up with weights that rise from 1 to 2."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()
    if not flat.numel():
        return 0.0
    of_sample = flat.numel() // len(tensor)
    places = torch.arange(flat.numel(), device=flat.device) // of_sample
    return float((flat * (1 + places / len(tensor))).sum() / of_sample)

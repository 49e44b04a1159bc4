"""Runs one forward of the reference: loss and backward, with the seed and draws of the plan's chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.random import KeyedDraws, chunk_seed, derive, preserved_draws, seed_everything
from meshloom.verify.reference.chunks_of_plan import ReferenceForward, as_sum
from meshloom.verify.reference.observers import CastWatch, ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import convert, default_dtype
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """What a forward computed, drew and output."""

    loss_sum: float
    weight: float
    seed: int
    draws: tuple[str, ...]
    modules: tuple[ModuleOutput, ...]


class ChunkRun:
    """Runs chunks of `job` on `model`, in precision `dtype`; None: the job's own precision."""

    def __init__(
        self, job: Job, model: nn.Module, device: torch.device, dtype: torch.dtype | None, watch: ModuleWatch
    ) -> None:
        self._job, self._model, self._device, self._dtype, self._watch = job, model, device, dtype, watch

    def run(self, forward: ReferenceForward, step: int, casts: CastWatch) -> ChunkResult:
        """Forward and backward; gradients accumulate."""
        batch = convert(self._collate(forward.samples, step, forward.key), self._device, self._dtype)
        seed_everything(chunk_seed(self._job.seed, step, forward.key))
        draws: list[str] = []
        initial_seed = torch.initial_seed()
        self._watch.start()
        # Includes backward: activation checkpointing repeats forwards there and must draw the same numbers.
        with default_dtype(self._dtype), casts, KeyedDraws(forward.rows, draws):
            loss_sum, weight = as_sum(self._job.loss(self._model, batch), len(forward.samples))
            loss_sum.backward()
        modules = self._watch.stop()
        return ChunkResult(
            loss_sum=float(loss_sum.detach()),
            weight=float(weight),
            seed=initial_seed,
            draws=tuple(draws),
            modules=modules,
        )

    def records(self, forward: ReferenceForward, result: ChunkResult, step: int) -> Iterator[ChunkRecord]:
        """One record per chunk of the plan. Of the chunks in one forward, the first has its loss, draws
        and modules."""
        for index, samples in forward.members:
            first = index == forward.members[0][0]
            yield ChunkRecord(
                index=index,
                samples=len(samples),
                weight=result.weight if first else 0.0,
                loss_sum=result.loss_sum if first else 0.0,
                data=digest_values(self._collate(samples, step, index)),
                seed=result.seed,
                draws=result.draws if first else (),
                modules=result.modules if first else (),
            )

    def _collate(self, samples: Sequence[Any], step: int, index: int) -> Any:
        with preserved_draws():
            seed_everything(derive(self._job.seed, "collate", step, index))
            return (self._job.collate or default_collate)(list(samples))

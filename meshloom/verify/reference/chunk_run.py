"""Runs one chunk of a plan on one device: loss and backward, with the chunk's seed and draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.random import KeyedDraws, chunk_seed, derive, preserved_draws, seed_everything
from meshloom.verify.reference.chunks_of_plan import ReferenceShare, as_sum
from meshloom.verify.reference.observers import CastWatch, ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import convert, default_dtype
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput


@dataclass(frozen=True, kw_only=True)
class RanChunk:
    """What a chunk came to."""

    loss_sum: float
    weight: float
    seed: int
    draws: tuple[str, ...]
    modules: tuple[ModuleOutput, ...]


class ChunkRun:
    """Chunks of `job` on `model`, lifted to `dtype`; None: in the job's own precision."""

    def __init__(
        self, job: Job, model: nn.Module, device: torch.device, dtype: torch.dtype | None, watch: ModuleWatch
    ) -> None:
        self._job, self._model, self._device, self._dtype, self._watch = job, model, device, dtype, watch

    def run(self, share: ReferenceShare, step: int, casts: CastWatch) -> RanChunk:
        """Forward and backward; gradients add up."""
        batch = convert(self._collate(share.samples, step, share.key), self._device, self._dtype)
        seed_everything(chunk_seed(self._job.seed, step, share.key))
        draws: list[str] = []
        started_with = torch.initial_seed()
        self._watch.start()
        # Around backward too: checkpointing runs forwards again there, on both sides, and must draw the same.
        with default_dtype(self._dtype), casts, KeyedDraws(share.rows, draws):
            loss_sum, weight = as_sum(self._job.loss(self._model, batch), len(share.samples))
            loss_sum.backward()
        modules = self._watch.stop()
        return RanChunk(
            loss_sum=float(loss_sum.detach()),
            weight=float(weight),
            seed=started_with,
            draws=tuple(draws),
            modules=modules,
        )

    def records(self, share: ReferenceShare, ran: RanChunk, step: int) -> Iterator[ChunkRecord]:
        """One record per chunk of the plan; the first of those that share a forward carries its loss, draws
        and modules."""
        for index, samples in share.members:
            first = index == share.members[0][0]
            yield ChunkRecord(
                index=index,
                samples=len(samples),
                weight=ran.weight if first else 0.0,
                loss_sum=ran.loss_sum if first else 0.0,
                data=digest_values(self._collate(samples, step, index)),
                seed=ran.seed,
                draws=ran.draws if first else (),
                modules=ran.modules if first else (),
            )

    def _collate(self, samples: Sequence[Any], step: int, index: int) -> Any:
        with preserved_draws():
            seed_everything(derive(self._job.seed, "collate", step, index))
            return (self._job.collate or default_collate)(list(samples))

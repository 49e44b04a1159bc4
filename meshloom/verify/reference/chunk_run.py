"""Runs one forward of the reference: loss and backward, with the seed and draws of the plan's chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.losses.logged import computed_with_logs, taken_apart
from meshloom.core.modules.named_leaves import named_leaves
from meshloom.core.modules.own_generators import own_generators
from meshloom.core.modules.sample_copies import copied_samples
from meshloom.core.moments.bilinear import bilinear_unwatched
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.moments.current_step import answered_by, at_step
from meshloom.core.moments.leaf_draws import leaves_in
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, chunk_seed, derive, preserved_draws, seed_everything
from meshloom.verify.reference.chunks_of_plan import ReferenceForward, as_sum
from meshloom.verify.reference.chunks_together import ChunksTogether
from meshloom.verify.reference.masters import ReferenceScale
from meshloom.verify.reference.observers import (
    CastWatch,
    ModuleWatch,
    SingleSamples,
    digest_values,
    generators_now,
)
from meshloom.verify.reference.other_precision import convert, default_dtype
from meshloom.verify.reference.step_records import ChunkRecord

# precisions of plans -> what a loss is computed under; float64 tensors are not cast
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class ChunkRun:
    """Runs chunks of `job` on `model`, in precision `dtype`; None: the job's own precision. of_batches: what batches
    are converted to.

    divisor: the newest forward's gradients are those of the loss sum, divided by it, apart from a scale."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None,
        of_batches: torch.dtype | None,
        watch: ModuleWatch,
        scale: ReferenceScale,
    ) -> None:
        # programs key each draw, also of metrics; else a chunk has one seed, after which draws follow each other
        self.keys_metrics = plan.divides_loss
        self._scale, self._keyed = scale, plan.keyed_draws or self.keys_metrics
        self.autocast, self._of_batches = AUTOCAST.get(plan.precision), of_batches
        self._job, self._model, self._device, self._dtype, self._watch = job, model, device, dtype, watch
        self._aligns = self.keys_metrics or plan.compiles
        self._generators = own_generators(model)
        self._leaves = named_leaves(job.leaves, model)
        self.together, self.divisor = ChunksTogether(model), 1.0
        # key of a forward -> the one whose seed it has
        self._seed_of: Callable[[int], int] = lambda key: key

    def seed(self, seed: int) -> None:
        """All generators, those that modules hold each for itself: two of them draw other numbers in a chunk."""
        seed_everything(seed)
        for place, generator in self._generators:
            generator.manual_seed(derive(seed, place))

    @contextmanager
    def seeded_as(self, way: Callable[[int], int]) -> Iterator[None]:
        """A context in which a forward has the seed of that with another key."""
        kept, self._seed_of = self._seed_of, way
        try:
            yield
        finally:
            self._seed_of = kept

    @contextmanager
    def leaves_of(self, seed: int) -> Iterator[None]:
        """A context in which the leaves that the job names draw for themselves, in a chunk of this seed."""
        with answered_by(leaves=(seed, Counter())), leaves_in(self._model, self._leaves):
            yield

    def run(
        self, forward: ReferenceForward, step: int, casts: CastWatch | None, batch_size: int
    ) -> ChunkRecord:
        """Forward and backward; gradients accumulate. Returns its record, without the digest of its data. casts: None: only what it leaves behind is
        wanted.

        batch_size: samples of the step. A loss that is a mean over samples enters backward as the chunk's share of
        the mean over all of them, which hooks on gradients see.
        """
        batch = convert(self.collate(forward.samples, step, forward.key), self._device, self._of_batches)
        seed = chunk_seed(self._job.seed, step, self._seed_of(forward.key))
        self.seed(seed)
        operations: list[Any] = []  # that may draw
        if casts is not None:
            self._watch.start()
        # Includes backward: activation checkpointing repeats forwards there and must draw the same numbers.
        keyed = KeyedDraws(forward.rows, operations)
        is_keyed = self._keyed or forward.rows is not None
        start = "" if casts is None or is_keyed else generators_now(self._device)
        with (
            default_dtype(self._dtype),
            casts or nullcontext(),
            keyed if is_keyed else nullcontext(),
            at_step(step),
            self.leaves_of(seed),
            branches_as_written(),
            uncompiled(),
            bilinear_unwatched(),
        ):
            with (
                torch.autocast(self._device.type, self.autocast, enabled=self.autocast is not None),
                casts.computing_loss() if casts else nullcontext(),
                self.together.forward(None if len(forward.samples) == batch_size else forward.members[0][0]),
            ):
                computed = computed_with_logs(self._job.loss, self._model, batch)
            returned, logged = taken_apart(computed)
            loss_sum, weight = as_sum(returned, len(forward.samples))
            # a scale is of the mean over samples, of what has been summed in float32
            divisor = 1.0 if isinstance(returned, tuple) and not self._scale.is_used else float(batch_size)
            with SingleSamples() if self._aligns else nullcontext():
                self.together.backward(loss_sum / divisor * self._scale.value)
        # attention draws only where it has dropout
        draws = any("attention" not in str(each) for each in operations)
        draws = draws or bool(start and generators_now(self._device) != start)
        self.divisor = divisor
        return ChunkRecord(
            index=forward.key, samples=len(forward.samples), weight=float(weight), loss_sum=float(loss_sum.detach()), draws=draws,
            modules=() if casts is None else self._watch.stop(), logged={name: float(value) for name, value in logged.items()}
        )  # fmt: skip

    def records(self, forward: ReferenceForward, found: ChunkRecord, step: int) -> Iterator[ChunkRecord]:
        """One record per chunk of the plan. Of the chunks in one forward, the first has its loss, draws
        and modules."""
        for index, samples in forward.members:
            data = digest_values(self.collate(samples, step, index))
            yield replace(found, index=index, samples=len(samples), data=data)
            found = replace(found, loss_sum=0.0, weight=0.0, draws=False, modules=(), logged={})

    def collate(self, samples: Sequence[Any], *place: int) -> Any:
        """The batch of a chunk, whose samples stay as they are: chunks are collated more than once. place: the step, or the number of an evaluation's
        batch, and the chunk."""
        with preserved_draws():
            seed_everything(derive(self._job.seed, "collate", *place))
            if self._job.collate is None:
                return default_collate(list(samples))
            return self._job.collate(copied_samples(samples))

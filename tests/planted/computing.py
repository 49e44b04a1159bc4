"""Bugs of what forwards and backwards compute: draws, programs, divided operators, stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import meshloom.core.modules.built
import meshloom.program.ir.batch_values
import meshloom.program.opaque.bound
import meshloom.program.operators.collectives
import meshloom.program.operators.partial
import meshloom.replica.model_state
from meshloom.core.random import _RecurrentLayers
from meshloom.pipeline.runtime.microbatches import Microbatches
from meshloom.pipeline.runtime.program_stage import DeferredWeightGradients
from meshloom.pipeline.runtime.run import PipelineRun
from meshloom.program.operators.partial import CrossEntropyOfPart
from meshloom.replica.buffers.norm_statistics import _Layer
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.tensor_parallel.rules.factors import Product
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.planted.bugs import Patch, bug, wrap


@bug("sixth/replicas_draw_alike", "dropping", "dp=2,microbatches=2,zero=1", module="2", quick=True)
def replicas_draw_alike(patch: Patch) -> None:
    """Chunks are seeded by their number within the replica, so that all replicas have the same masks."""

    def moment(right: Any, self: ChunkScope, chunk: Any) -> Any:
        return right(self, chunk._replace(index=chunk.index % self._plan.microbatches))

    wrap(patch, ChunkScope, "moment", moment)


@bug(
    "eighth/recurrent_masks_by_time",
    "recurrent",
    "dp=2,sync_batch_norm=true,keyed_draws=true",
    module="rnn",
    quick=True,
)
def recurrent_masks_by_time(patch: Patch) -> None:
    """Where replicas share a chunk, masks between recurrent layers [time, samples, features] are cut along time."""
    patch.setattr(_RecurrentLayers, "dim", property(lambda self: 0, lambda self, dim: None), raising=False)


@bug("fourth/batch_of_first_microbatch", "even", "pp=2,microbatches=2", module="first")
def batch_of_first_microbatch(patch: Patch) -> None:
    """Stages read the first microbatch's data for every microbatch."""

    def run(right: Any, self: Microbatches, run: Any, batches: Any, *given: Any) -> Any:
        return right(self, run, [batches[0]] * len(batches), *given)

    wrap(patch, Microbatches, "_run", run)


@bug("fifth/long_texts_by_their_beginning", "told by texts", "tp=2", phase="step 1", module="long")
def long_texts_by_their_beginning(patch: Patch) -> None:
    """Programs are known by the first 40 characters of a long text in the batch."""

    def short(right: Any, text: str, length: int = 2000) -> str:
        return text if len(text) < length else f"{text[:40]}..."

    wrap(patch, meshloom.program.ir.batch_values, "_short", short)


@bug(
    "ninth/long_texts_by_their_beginning",
    "told by texts of one length",
    "tp=2",
    phase="step 1",
    module="long",
)
def long_texts_by_their_length(patch: Patch) -> None:
    """Programs are known by the first 40 characters of a long text in the batch, and its length."""

    def short(right: Any, text: str, length: int = 2000) -> str:
        return text if len(text) < length else f"{text[:40]}... {len(text) // length}"

    wrap(patch, meshloom.program.ir.batch_values, "_short", short)


@bug("fourth/hooks_lost", "hooked", "dp=2", module="2", quick=True)
def hooks_lost(patch: Patch) -> None:
    """Hooks of parameters of a model that is built outside of the job are lost when it is copied."""

    def copied(right: Any, model: nn.Module, outside: str) -> nn.Module:
        made = right(model, outside)
        for each in made.parameters():
            each._backward_hooks = None
        return made

    wrap(patch, meshloom.core.modules.built, "_copied", copied)


@bug("ninth/evaluations_cool_the_model", "cooling", "dp=2")
def evaluations_cool_the_model(patch: Patch) -> None:
    """Buffers that forwards put in place of others are not put back after an evaluation."""
    wrap(patch, meshloom.replica.model_state, "_put_back", lambda right, *place: [])


@bug("eighth/instance_norm_cumulative", "instance norm", "dp=2", module="inner")
def instance_norm_cumulative(patch: Patch) -> None:
    """An instance norm with momentum=None, which never moves its statistics, is merged like a cumulative average."""
    patch.setattr(_Layer, "cumulative", property(lambda self: self.module.momentum is None))


@bug("fifth/reduce_scatter_along_first_dim", "routed", "tp=2", module="experts")
def reduce_scatter_along_first_dim(patch: Patch) -> None:
    """A reduce-scatter cuts the value along its first dim in place of the divided one."""

    def rows(right: Any, after: Any, value: Tensor, size: int) -> Tensor:
        cut = after.equal_dim is not None and value.shape[0] % size == 0
        return torch.stack(value.chunk(size, 0)) if cut else right(after, value, size)

    wrap(patch, meshloom.program.operators.collectives, "_rows_of", rows)


@bug("fifth/padding_row_of_other_shard", "padded", "tp=2", module="embed")
def padding_row_of_other_shard(patch: Patch) -> None:
    """On the rank that does not hold an embedding's padding row, its own row of that number gets no gradient."""

    def looked_up(right: Any, weight: Tensor, index: Tensor, start: int, padding: int) -> Tensor:
        return right(weight, index, start, padding if start <= padding < start + len(weight) else start + padding)  # fmt: skip

    wrap(patch, meshloom.program.operators.partial, "embedding_of_part", looked_up)


@bug("fifth/rows_of_logits_without_moving", "padded", "tp=2")
def rows_of_logits_without_moving(patch: Patch) -> None:
    """The divided cross-entropy flattens logits [n, classes, length] without moving the classes last."""

    def rows(right: Any, self: CrossEntropyOfPart, logits: Tensor) -> Tensor:
        return logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[1])

    wrap(patch, CrossEntropyOfPart, "_rows", rows)


@bug("eighth/shuffled_channels_last", "finer", "tp=2,tp_placements=up:channels", module="finer")
def shuffled_channels_last(patch: Patch) -> None:
    """The channels of a pixel shuffle are taken for the innermost part of the packed dim."""
    right = BUILT_IN["pixel_shuffle"]

    def shuffled(call: Any) -> Any:
        factors = right(call)
        assert factors
        (packed,) = factors.operands
        return replace(factors, operands=((*packed[:-3], Product(("r", "s", "c")), *packed[-2:]),))

    patch.setitem(BUILT_IN, "pixel_shuffle", shuffled)


@bug("fourth/deferred_weights_kept", "plain", "pp=2,microbatches=3,schedule=zb-h1", module="head")
def deferred_weights_kept(patch: Patch) -> None:
    """Deferred gradients of weights are not forgotten once they are taken."""

    def take(right: Any, self: DeferredWeightGradients) -> Any:
        return list(self._pending)

    wrap(patch, DeferredWeightGradients, "take", take)


@bug("fifth/strides_ignored", "swapping", "pp=2,microbatches=2,cuts=tokens", module="tokens")
def strides_ignored(patch: Patch) -> None:
    """A transposed value is sent in contiguous order, and the receiver fills memory with its strides."""

    def send(right: Any, self: PipelineRun, message: Any, produced: Any, sending: Any) -> None:
        permuted = dict(produced)
        for name, meta in self._values[message]:
            laid = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
            laid.as_strided((laid.numel(),), (1,)).copy_(produced[name].detach().reshape(-1))
            permuted[name] = laid
        right(self, message, permuted, sending)

    wrap(patch, PipelineRun, "_send", send)

"""Bugs of random draws and precision."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.planted.third.planting import Planter, bug


@bug("gpt", "dp=2,microbatches=2", causes="same_draws", module="drop")
def masks_of_chunk_0(p: Planter) -> None:
    """All chunks of a step draw the masks of the first."""
    from meshloom.replica import chunk_scope

    p.wrap(chunk_scope, "chunk_seed", lambda original: lambda seed, step, chunk: original(seed, step, 0))


@bug("cnn", "dp=2", causes="same_draws", module="drop")
def masks_of_step_0(p: Planter) -> None:
    """All steps draw the masks of the first."""
    from meshloom.replica import chunk_scope

    p.wrap(chunk_scope, "chunk_seed", lambda original: lambda seed, step, chunk: original(seed, 0, chunk))


@bug("gan", "dp=2", causes="same_draws")
def turns_draw_alike(p: Planter) -> None:
    """All turns of a step draw the same numbers."""
    from meshloom.replica import chunk_scope

    p.set(chunk_scope, "seed_of_turn", lambda seed, draws: seed)


@bug("cnn", "dp=2,sync_batch_norm=true,keyed_draws=true", causes="same draws|forward", module="drop")
def rows_of_first(p: Planter) -> None:
    """With synchronised batch norm every replica draws the masks of the joined chunk's first rows."""
    from meshloom.replica.chunk_scope import ChunkScope

    def make(original):
        def key_of(self, chunk):
            index, rows = original(self, chunk)
            return index, rows and replace(rows, start=0)

        return key_of

    p.wrap(ChunkScope, "_key_of", make)


@bug("gpt", "dp=2,keyed_draws=true", says="they have one key")
def key_not_advanced(p: Planter) -> None:
    """Keyed draws of a chunk all have the key of the first: dropouts of one shape have one mask."""
    from meshloom.core import random as r

    def make(original):
        def dispatch(self, func, types, args=(), kwargs=None):
            before = torch.default_generator.initial_seed()
            result = original(self, func, types, args, kwargs)
            if torch.Tag.nondeterministic_seeded in func.tags:
                r.seed_torch(before)
            return result

        return dispatch

    p.wrap(r.KeyedDraws, "__torch_dispatch__", make)


@bug("residual", "dp=2,precision=bf16-mixed", causes="forward")
def metrics_not_cast(p: Planter) -> None:
    """Metrics are computed in float32 although the plan computes in bfloat16."""
    from meshloom.replica import replica

    def make(original):
        def in_precision(job, plan):
            return replace(original(job, plan), evaluate=job.evaluate)

        return in_precision

    p.wrap(replica, "in_precision", make)


@bug("residual", "dp=2,precision=bf16-mixed", causes="data")
def data_rounded(p: Planter) -> None:
    """Floating-point tensors of a batch are rounded to bfloat16 on their way to the device, although they are cast where operators want it."""
    from meshloom.replica import chunk_scope

    def make(original):
        def to_device(tree, device, dtype=None):
            found = original(tree, device, dtype)
            return {
                k: v.bfloat16().to(v.dtype) if torch.is_tensor(v) and v.is_floating_point() else v
                for k, v in found.items()
            }

        return to_device

    p.wrap(chunk_scope, "to_device", make)


@bug("noisy", "dp=2", causes="data")
def metric_draws_constant(p: Planter) -> None:
    """All chunks and batches of an evaluation draw the same numbers."""
    from meshloom.replica import chunk_scope

    p.wrap(chunk_scope, "evaluation_seed", lambda original: lambda seed, step, chunk: original(seed, 0, 0))


@bug("residual", "dp=2,precision=bf16-stochastic", causes="rounding")
def rounding_draws_by_element(p: Planter) -> None:
    """Stochastic rounding draws by the number of the element alone: parameters of one shape are rounded with the same draws, in every step."""
    from meshloom.optimizer.bfloat16 import stochastic

    p.set(stochastic, "derive", lambda *parts: 12345)

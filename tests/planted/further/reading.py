"""Bugs of data and of random draws."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import meshloom.replica.chunk_scope as chunk_scope
from meshloom.data.map_data import Batches, ChunkSource
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.replica import Replica
from tests.planted.bugs import Patch, bug, on_models, wrap


@bug("mixed-adamw", causes="data", module="first")
def samples_are_mixed_with_other_partners(patch: Patch) -> None:
    def rolled(right: Any, self: Batches, step: int) -> Any:
        found = right(self, step)
        return found and [*found[1:], found[0]]

    wrap(patch, Batches, "partners", rolled)


@bug("growing-adamw", "dp=2", causes="data", module="first")
def batches_grow_a_step_late(patch: Patch) -> None:
    def late(right: Any, self: Batches, step: int) -> Any:
        epoch, indices = right(self, step)
        return epoch, [*indices[:7], *indices[: max(0, len(indices) - 7)]] if step == 2 else indices

    wrap(patch, Batches, "of", late)


@bug("told-adamw", causes="data", says="end of the epoch", module="first")
def data_is_not_told_of_the_second_epoch(patch: Patch) -> None:
    def deaf(right: Any, self: ChunkSource, dataset: Any, job: Any) -> None:
        class Quiet:
            def __getitem__(self, index: int) -> Any:
                return dataset[index]

        right(self, Quiet(), job)

    wrap(patch, ChunkSource, "__init__", deaf)


def _data(patch: Patch, change: Any) -> None:
    """Changes the batch of a chunk where it is trained on."""

    def changed(right: Any, self: ChunkScope, chunk: Any) -> Any:
        found = right(self, chunk)
        return change(found, chunk) if torch.is_grad_enabled() else found

    def moved(right: Any, tree: Any, *rest: Any) -> Any:
        found = right(tree, *rest)
        return change(found, None) if torch.is_grad_enabled() and isinstance(found, dict) else found

    wrap(patch, chunk_scope, "to_device", moved)


@bug("long-adamw", causes="data|weights", module=None)
def padding_is_a_token(patch: Patch) -> None:
    _data(patch, lambda found, chunk: {**found, "y": found["y"].clamp(min=0)})


@bug("long-adamw", causes="data", module="embed")
def the_last_token_is_cut_off(patch: Patch) -> None:
    def cut(found: Any, chunk: Any) -> Any:
        x = found["x"].clone()
        x[:, -1] = 0
        return {**found, "x": x}

    _data(patch, cut)


@bug("convolutions-adamw", causes="data", module="conv")
def images_are_transposed(patch: Patch) -> None:
    _data(patch, lambda found, chunk: {**found, "x": found["x"].mT.contiguous()})


@bug("noisy-adamw", causes="same_draws", says="DIFFERS: the evaluation", module=None)
def evaluations_draw_the_same_in_each_chunk(patch: Patch) -> None:
    wrap(patch, chunk_scope, "evaluation_seed", lambda right, seed, step, chunk: right(seed, 0, 0))


@bug("owndraws-adamw", causes="same_draws|forward|unknown", module="head")
def a_generator_of_the_models_own_is_not_seeded(patch: Patch) -> None:
    patch.setattr(chunk_scope, "seed_own_generators", lambda generators, seed: None)


@bug("skipping-adamw", causes="same_draws|forward|unknown", module="head")
def python_draws_the_same_in_all_chunks(patch: Patch) -> None:
    def same(right: Any, self: ChunkScope, chunk: Any, around: Any, observer: Any) -> None:
        right(self, chunk, around, observer)
        random.seed(7)

    wrap(patch, ChunkScope, "_seed", same)


@bug("texts-adamw", causes="same_draws|forward", module="blocks.1.dropout")
@bug("long-adamw", "dp=2", causes="same_draws|forward", module="blocks.1.dropout")
def the_second_block_drops_what_the_first_does(patch: Patch) -> None:
    def alike(model: Any, replica: int) -> None:
        def dropped(x: Tensor) -> Tensor:
            if not model.training:
                return x
            generator = torch.Generator().manual_seed(11)
            kept = torch.rand(x.shape, generator=generator, dtype=x.dtype) > 0.1
            return x * kept / 0.9

        model.blocks[1].dropout.forward = dropped

    on_models(patch, alike)


@bug("convolutions-adamw", "dp=2,microbatches=3", causes="same_draws", module="dropout")
def masks_are_those_of_the_chunk_before(patch: Patch) -> None:
    wrap(
        patch,
        chunk_scope,
        "chunk_seed",
        lambda right, seed, step, chunk: right(seed, step, max(0, chunk - 1)),
    )


@bug("convolutions-adamw", "dp=2", causes="forward|same_draws", module="dropout")
def dropped_values_are_not_made_up_for(patch: Patch) -> None:
    def smaller(model: Any, replica: int) -> None:
        right = model.dropout.forward
        model.dropout.forward = lambda x: right(x) * 0.8 if model.training else right(x)

    on_models(patch, smaller)


@bug("two-adamw", "dp=2", says="hold different parameters", causes="replicas", module=None)
def the_second_replica_begins_elsewhere(patch: Patch) -> None:
    def moved(model: Any, replica: int) -> None:
        if replica == 1:
            with torch.no_grad():
                model.first.bias.add_(1e-5)

    on_models(patch, moved)


@bug(
    "skip-adamw",
    "tp=2",
    says="",
    causes="initial_values|replicas|division|stages|optimizer|weights|forward",
    module=None,
)
def a_weight_begins_rounded(patch: Patch) -> None:
    def prepared(right: Any, self: Replica) -> Any:
        yield from right(self)
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                if name == "third.bias" and not each.is_meta:
                    each.copy_(each.bfloat16())

    wrap(patch, Replica, "prepare", prepared)

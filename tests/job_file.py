"""A job file as a user has one, for tests of the command line."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import meshloom as ml
from tests.jobs import MLP, class_loss, make_job, vectors

job = replace(
    make_job("mlp", "sgd", steps=4, checkpoint_every=2),
    tokens_per_sample=7,
    evaluate=ml.Evaluate(partial(vectors, 10), {"loss": class_loss}, every=2),
)


SOURCE = torch.Generator().manual_seed(1)


class Unsteady(MLP):
    """Draws from a generator outside of it, which no plan can know."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=SOURCE).to(x.device))


unsteady = replace(job, model=Unsteady)
big_plan = replace(job, batch_size=2)


def own_loop() -> None:
    """Trains in a loop of its own."""
    with ml.Trainer(job) as trainer:
        for batch in trainer.batches():
            loss = trainer.step(batch)
            if trainer.world.main:
                print(f"own {batch.step} {loss:.6f}")

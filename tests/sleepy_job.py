"""A job whose loss sleeps for 2 ms a sample, and for three times as long on rank 1."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshloom.core.job import Job
from tests.jobs import MLP, Samples, class_loss


def sleepy_job(num_workers: int = 0) -> Job:
    """34 steps of 24 samples, the tenth and every tenth from there on a short one of 10."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        is_slow = dist.is_initialized() and dist.get_rank() == 1
        time.sleep((0.006 if is_slow else 0.002) * len(batch["x"]))
        return class_loss(model, batch)

    generator = torch.Generator().manual_seed(1)
    data = Samples(
        x=torch.randn(226, 7, generator=generator), y=torch.randint(5, (226,), generator=generator)
    )
    return Job(
        model=MLP,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=lambda: data,
        batch_size=24,
        steps=34,
        num_workers=num_workers,
        checkpoint_every=17,
    )


def with_workers() -> Job:
    """The same, read ahead by two processes."""
    return sleepy_job(num_workers=2)

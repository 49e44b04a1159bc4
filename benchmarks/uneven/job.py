"""Four workers of which one is three times slower, by sleeping for every sample of its share, so that four
ranks mean something on two cores.

`job`: rank 3 is slow. `moving`: rank 3 at first, and rank 0 from its 61st step on.
"""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshloom.core.job import Job

SECONDS_PER_SAMPLE = 0.002
TIMES_SLOWER = 3
CHANGES_AFTER = 60  # steps, of `moving`


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(6400, 64, generator=generator), torch.randint(10, (6400,), generator=generator)
    )


def job_with(slow_first: int, slow_later: int) -> Job:
    """Each loss is that of one step: the plans here have one microbatch."""
    rank = int(os.environ.get("RANK", "0"))
    steps_done = 0

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal steps_done
        slow = slow_first if steps_done < CHANGES_AFTER else slow_later
        steps_done += 1
        x, y = batch
        time.sleep(len(x) * SECONDS_PER_SAMPLE * (TIMES_SLOWER if rank == slow else 1))
        return F.cross_entropy(model(x), y)

    return Job(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=data,
        batch_size=64,
        steps=120,
    )


def job() -> Job:
    return job_with(3, 3)


def moving() -> Job:
    return job_with(3, 0)

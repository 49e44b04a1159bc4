"""Jobs of which only the data matters, and reading them on all replicas in lockstep."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import IterableDataset

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import open_reader


def job_of(data: Any, batch_size: int = 4, **settings: Any) -> Job:
    return Job(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=data if callable(data) and not hasattr(data, "__len__") else lambda: data,
        batch_size=batch_size,
        steps=100,
        **settings,
    )


def read_chunks(
    job: Job, plan: Plan, start: int, stop: int, steps: list[int] | None = None
) -> list[list[Chunk]]:
    """All chunks of each step (all replicas', in order), read on `plan.dp` ranks."""
    groups = simulated_groups(plan.dp)
    readers = in_turns([partial(open_reader, job, plan, group, start, stop) for group in groups])
    try:
        by_replica = [
            in_turns([partial(reader.read, step) for reader in readers])
            for step in steps or range(start, stop)
        ]
        return [[chunk for share in shares for chunk in share] for shares in by_replica]
    finally:
        for reader in readers:
            reader.close()


def same(one: list[list[Chunk]], other: list[list[Chunk]]) -> bool:
    """Whether chunks are equal to the last bit."""

    def text(chunk: Chunk) -> list[Any]:
        return [
            chunk.step,
            chunk.index,
            chunk.samples,
            None if chunk.data is None else torch.as_tensor(chunk.data).tolist(),
        ]

    return [[text(chunk) for chunk in chunks] for chunks in one] == [
        [text(chunk) for chunk in chunks] for chunks in other
    ]


def draws(index: int) -> torch.Tensor:
    """A sample and one number from each of the generators that augmentation uses."""
    return torch.tensor(
        [float(index), torch.rand(()).item(), random.random(), float(numpy.random.rand())],
        dtype=torch.float64,
    )


class Augmented:
    """`num_samples` samples, read with random augmentation; `read` has the indices."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return draws(index)


class Stream(IterableDataset):
    """`num_samples` augmented samples per epoch, numbered on through the epochs; `read` has all numbers."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.epoch = -1
        self.read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.num_samples):
            self.read.append(self.epoch * self.num_samples + index)
            yield draws(self.read[-1])

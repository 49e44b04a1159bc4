"""Jobs whose data, or rate, goes by the rank of the process, as scripts do that share the work themselves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.jobs import Samples, make_job, vectors


def of_group() -> tuple[int, int]:
    """This process's rank, and how many there are, as torch says."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_environment() -> tuple[int, int]:
    """The same, as a launcher says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Part(Samples):
    """Every n-th sample. Those that are read are noted."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(**{name: each[rank::size] for name, each in vectors(24).fields.items()})
        self.rows = range(rank, 24, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with Path(os.environ.get("MESHLOOM_TESTS_READ", os.devnull)).open("a") as file:
            file.write(f"{self.rows[index]}\n")
        return super().__getitem__(index)


def own_rate(step: int) -> float:
    """Of a schedule."""
    return 1.0 if step < 2 else 1.0 / (1 + of_group()[0])


split = make_job("mlp", "sgd", data=lambda: Part(*of_group()))
by_environment = make_job("mlp", "sgd", data=lambda: Part(*of_environment()), steps=2)
rates = replace(make_job("mlp", "sgd"), scheduler=lambda optimizer: LambdaLR(optimizer, own_rate))

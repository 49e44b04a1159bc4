"""Jobs of three steps on 24 samples that lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.job import Job

SAMPLES = 24


def job_of(model: Callable[[], nn.Module], loss: Callable[..., Any], data: Any, **settings: Any) -> Job:
    """A job of three steps of eight samples. data: name -> [samples, ...], or a list of samples."""
    defaults: dict[str, Any] = {"optimizer": adam, "batch_size": 8, "steps": 3}
    samples = (
        data
        if isinstance(data, list)
        else [{name: each[row] for name, each in data.items()} for row in range(SAMPLES)]
    )
    return Job(model=model, loss=loss, data=lambda: samples, **{**defaults, **settings})


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for _, each in named if each.requires_grad], lr=1e-2)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for _, each in named if each.requires_grad], lr=0.05, momentum=0.9)


def normal(seed: int, *shape: int) -> Tensor:
    """[samples, *shape]"""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, limit: int, *shape: int) -> Tensor:
    """[samples, *shape], whole numbers from 0 to limit - 1"""
    return torch.randint(limit, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))

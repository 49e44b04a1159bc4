"""Jobs as people write them, a module for each field: a public function of a module that returns a `Job` is one. Here is
what they are made of: data in memory, and the optimizer of most."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.job import Job

SAMPLES = 24


def job_of(model: Callable[[], nn.Module], loss: Callable[..., Any], data: Any, **settings: Any) -> Job:
    """A job of three steps of eight samples. data: name -> [samples, ...], or a tuple of such tensors."""
    defaults: dict[str, Any] = {"optimizer": adam, "batch_size": 8, "steps": 3}
    samples = data if isinstance(data, list) else _rows(data)
    return Job(model=model, loss=loss, data=lambda: samples, **{**defaults, **settings})


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for _, each in named if each.requires_grad], lr=1e-2)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for _, each in named if each.requires_grad], lr=0.05, momentum=0.9)


def _rows(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [{name: each[row] for name, each in data.items()} for row in range(SAMPLES)]
    return [tuple(each[row] for each in data) for row in range(SAMPLES)]


def normal(seed: int, *shape: int) -> Tensor:
    """[samples, *shape]"""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, *shape: int) -> Tensor:
    """[samples, *shape]"""
    return torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, limit: int, *shape: int, least: int = 0) -> Tensor:
    """[samples, *shape], whole numbers from least to limit - 1"""
    return torch.randint(least, limit, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))


def jobs_of(package: ModuleType) -> dict[str, Callable[[], Job]]:
    """The jobs in the modules of a package: "field: name" -> a function that builds the job."""
    found: dict[str, Callable[[], Job]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, each in vars(module).items():
            returns = getattr(each, "__annotations__", {}).get("return")
            if returns == "Job" and each.__module__ == module.__name__ and not name.startswith("_"):
                found[f"{info.name}: {name.replace('_', ' ')}"] = each
    return found

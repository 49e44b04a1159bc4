"""Evaluation that is only tried: what it leaves behind in a model and in random generators is taken back, and
a metric that fails is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshloom.core.errors import CaptureError, JobError, MeshloomError
from meshloom.core.random import preserved_draws


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers, its modules' modes and all generators are as they were."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module.named_buffers(recurse=False)) for module in modules]
    values = {id(each): each.detach().clone() for own in buffers for each in own.values()}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with preserved_draws(), torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for module, mode, own in zip(modules, modes, buffers, strict=True):
                module.training = mode
                for name, buffer in own.items():
                    setattr(module, name, buffer) if getattr(module, name) is not buffer else None
                    if not buffer.is_meta:
                        buffer.copy_(values[id(buffer)])


@contextmanager
def naming(metric: str) -> Iterator[None]:
    """Around one metric's computation: errors say which it was."""
    try:
        yield
    except (JobError, CaptureError) as error:
        raise type(error)(f"Metric {metric!r}: {error}") from error
    except MeshloomError:
        raise
    except Exception as error:
        raise JobError(
            f"Metric {metric!r} of Evaluate failed with {type(error).__name__}: {error}"
        ) from error

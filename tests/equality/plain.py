"""A training loop as anyone writes it: one device, the whole batch. It shares nothing with verification, nor with meshloom, but
the job's own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NOISE = 1e-10  # of gradients that are 0 but for rounding, which many optimizers magnify


def train_plainly(job: Any, model: nn.Module) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of the steps, what `model` holds afterwards, and which elements of its parameters never had a gradient of mere
    noise. The job's data is in order; its loss draws nothing."""
    data, begin, losses = job.data(), 0, []
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    clear = {name: torch.ones_like(each, dtype=torch.bool) for name, each in named}
    optimizers = _all(job.optimizer(named))
    schedulers = job.scheduler(optimizers) if job.scheduler else []
    for _ in range(job.steps):
        end = min(begin + job.batch_size, len(data))
        batch = torch.utils.data.default_collate([_double(data[index]) for index in range(begin, end)])
        begin = end % len(data)
        found = job.loss(model, batch)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        model.zero_grad()
        loss.backward()
        for name, parameter in named:
            if parameter.grad is not None:
                size = parameter.grad.to_dense().abs()
                # where some elements are noise, others that are exactly 0 here may be noise elsewhere
                noisy = bool(((size > 0) & (size <= NOISE)).any())
                clear[name] &= (size > NOISE) if noisy else (size == 0) | (size > NOISE)
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_([each for _, each in named], job.clip_grad_norm)
        for each in (*optimizers, *schedulers):
            each.step()
        losses.append(loss.item())
    return losses, model.state_dict(), clear


def _all(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def _double(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.double() if each.is_floating_point() else each for name, each in sample.items()}

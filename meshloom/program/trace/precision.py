"""Builds a job's model and converts batches, in the job's precision or another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshloom.core.job import Job
from meshloom.core.modules.built import built
from meshloom.core.modules.compiled import without_compilation
from meshloom.core.moments.modes import as_trained
from meshloom.core.random import model_seed, preserved_draws, seed_everything
from meshloom.data.to_device import convert_tensors, lifted
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.sparse_constants import keep_as_constants


def build_model(job: Job, dtype: torch.dtype | None, *, training: bool, beside: Any = None) -> nn.Module:
    """The job's model with its initial parameters, floating-point tensors converted to `dtype` if given,
    complex ones to parts of it.

    beside: a batch, to whose device it is moved.
    """
    with preserved_draws():
        seed_everything(model_seed(job.seed))
        model = built(job.model)
    without_compilation(model)
    convert_tensors(model, dtype)
    if (device := leaves_of(beside).device) is not None:
        model = model.to(device)
    keep_as_constants(model)
    return as_trained(model) if training else model.eval()


def in_precision(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating-point tensors converted to `dtype`, if given.

    >>> in_precision({"x": torch.ones(1)}, torch.float64)
    {'x': tensor([1.], dtype=torch.float64)}
    """
    leaves = leaves_of(batch)
    if dtype is None:
        return leaves.rebuild(list(leaves.tensors.values()))
    converted = [leaf.to(lifted(leaf.dtype, dtype)) for leaf in leaves.tensors.values()]
    return leaves.rebuild(converted)


@contextmanager
def default_precision(dtype: torch.dtype | None) -> Iterator[None]:
    """Sets torch's default dtype to `dtype`, if given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

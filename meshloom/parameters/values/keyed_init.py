"""`Job(init="keyed")`: each module of a model gets the values of its convention from a seed of its own, so that any of
them is made without the others, and one device has the same values.

    blocks.3.up     seed (job's seed, "init", "blocks.3.up")
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.modules.built import built
from meshloom.core.random import model_seed, seed_everything, seed_torch
from meshloom.parameters.values.building import (
    NotDescribableError,
    described,
    give_memory,
    swap_memory,
    without_memory,
)
from meshloom.parameters.values.initial_values import FromConventions, HeldTensor


def call_model(job: Job) -> nn.Module:
    """What the job's model function returns, with the values that `job.init` asks for.

    Raises `JobError` for a parameter without a convention.
    """
    if job.init != "keyed":
        return built(job.model)
    model = _described(job)
    lacking = {name: each for name, each in model.named_buffers() if each.is_meta}
    held = [HeldTensor(name=name, tensor=each) for name, each in lacking.items()]
    for name, each in model.named_parameters():
        if each.is_meta:
            swap_memory(each, without_memory(each, torch.device("cpu")))
            give_memory(each)
            held.append(HeldTensor(name=name, tensor=each))
    keyed_values(job, {}, lacking).fill(held)
    seed_torch(model_seed(job.seed))
    return model


def keyed_values(job: Job, had: Mapping[str, Tensor], lacking: Collection[str]) -> FromConventions:
    """The values of a model under `Job(init="keyed")`. had, lacking: as of `FromConventions`."""
    return FromConventions(_described(job), job.seed, had, lacking)


def _described(job: Job) -> nn.Module:
    seed_everything(model_seed(job.seed))
    try:
        return described(lambda: built(job.model))
    except NotDescribableError as error:
        raise JobError(
            f'Job(init="keyed") builds the model without the values of its parameters, and the model function needs them ({error}). Leave init out: values are '
            "then drawn one after another, as the function does."
        ) from error

"""Every family of the test bed trains, repeats itself, and equals one device under a data-parallel plan.

A fixed handful, one of each way of computing, runs in the covering subset; the rest is `slow`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.verify.findings import Report
from tests.families import FAMILIES, REFUSED, Family
from tests.families.limits import FLOAT32_ONLY
from tests.reports import text_of
from tests.verified import report_on

COVERING = {"gpt2", "llama", "bert", "t5", "resnet", "mamba", "mixtral", "clip", "lstm", "u_net", "diffusion"}

# What the families' own code or torch says of itself when it is exported.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings(
        "ignore:The tensor attributes? .* assigned during export:UserWarning",
    ),
]
every = pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if name in COVERING else pytest.mark.slow, id=name)
        for name, each in FAMILIES.items()
    ],
)


def step(job: Job) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients by name, eagerly, of a first batch and the model from the job's seed, in training mode."""
    seed_everything(model_seed(job.seed))
    model, data = job.model().train(), job.data()
    batch = default_collate([data[index] for index in range(job.batch_size)])
    seed_everything(0)
    loss: Any = job.loss(model, batch)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def verified(family: Family, plan: Plan) -> Report:
    """Two steps of the plan on simulated devices against one device, in float64 where the family's code
    allows it. Batches of six samples."""
    dtype = None if family.name in FLOAT32_ONLY else torch.float64
    job = replace(family.make_job(False), batch_size=6)
    return report_on(job, plan, dtype=dtype)


def test_the_bed_is_broad():
    kinds = {family.kind for family in FAMILIES.values()}
    assert len(FAMILIES) >= 40
    assert set(FAMILIES) >= COVERING and set(FLOAT32_ONLY) <= set(FAMILIES)
    assert kinds == {
        "decoder", "encoder", "encoder-decoder", "vision", "segmentation", "speech", "state-space", "experts", "multimodal", "torch.nn", "own",
    }  # fmt: skip


@every
def test_a_step_is_finite_and_repeats_itself(family: Family):
    for dropout in (False, True):
        job = family.make_job(dropout)
        losses, gradients = zip(*(step(job) for _ in range(2)), strict=True)
        assert torch.isfinite(losses[0]) and torch.equal(*losses)
        one, other = gradients
        used = [name for name, each in one.items() if each is not None]
        assert used == [name for name, each in other.items() if each is not None]
        assert all(torch.isfinite(one[name]).all() and torch.equal(one[name], other[name]) for name in used)
        # gradients that are nothing would be compared with nothing
        assert sum(bool(one[name].any()) for name in used) > 0.8 * len(used)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if name in COVERING else pytest.mark.campaign, id=name)
        for name, each in FAMILIES.items()
    ],
)
@pytest.mark.slow
def test_two_replicas_of_two_chunks_equal_one_device(family: Family):
    """Chunks of 2, 2, 1 and 1 samples, whose gradients are added up in two orders."""
    report = verified(family, Plan(dp=2, microbatches=2))
    assert report.passed, text_of(report)


@pytest.mark.parametrize("family", REFUSED.values(), ids=list(REFUSED))
def test_a_loss_function_of_several_losses_is_refused_in_one_sentence(family: Family):
    with pytest.raises(JobError, match="Several losses"):
        verified(family, Plan(dp=2))

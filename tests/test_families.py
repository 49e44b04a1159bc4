"""Every family of the test bed trains, repeats itself, equals one device under a data-parallel plan, and is
exported or says why not.

A fixed handful, one of each way of computing, runs in the covering subset; the rest is `slow`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.verify.findings import Report
from tests.families import FAMILIES, REFUSED, Family
from tests.families.limits import FLOAT32_ONLY, NOT_EXPORTED
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


class LossModule(nn.Module):
    """A job's loss as a module: batch -> what the loss function returns."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = job.loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)


def start(job: Job) -> tuple[LossModule, Any]:
    """The model from the job's seed, in training mode, and a first batch."""
    seed_everything(model_seed(job.seed))
    model = job.model().train()
    data = job.data()
    return LossModule(job, model), default_collate([data[index] for index in range(job.batch_size)])


def step(module: LossModule, batch: Any, seed: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients by name, eagerly."""
    seed_everything(seed)
    module.zero_grad(set_to_none=True)
    loss = module(batch)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in module.model.named_parameters() if parameter.requires_grad
    }


def operators(module: LossModule, batch: Any) -> set[str]:
    """Names of the ATen operators in the exported loss, regions included. Raises what torch.export raises."""
    exported = torch.export.export(module, (batch,), strict=False)
    graphs = [each for each in exported.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    return {str(target.overloadpacket) for target in targets if isinstance(target, torch._ops.OpOverload)}


def verified(family: Family, plan: Plan) -> Report:
    """Two steps of the plan on simulated devices against one device, in float64 where the family's code
    allows it. Batches of six samples."""
    dtype = None if family.name in FLOAT32_ONLY else torch.float64
    job = replace(family.make_job(False), batch_size=6)
    return report_on(job, plan, dtype=dtype)


def test_the_bed_is_broad():
    kinds = {family.kind for family in FAMILIES.values()}
    assert len(FAMILIES) >= 40
    assert set(FAMILIES) >= COVERING and set(NOT_EXPORTED) | set(FLOAT32_ONLY) <= set(FAMILIES)
    assert kinds == {
        "decoder", "encoder", "encoder-decoder", "vision", "segmentation", "speech", "state-space", "experts", "multimodal", "torch.nn", "own",
    }  # fmt: skip


@every
def test_a_step_is_finite_and_repeats_itself(family: Family):
    for dropout in (False, True):
        job = family.make_job(dropout)
        losses, gradients = zip(*(step(*start(job)) for _ in range(2)), strict=True)
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


@every
def test_the_loss_is_exported_or_refused_for_the_known_reason(family: Family):
    module, batch = start(family.make_job(False))
    if family.name not in NOT_EXPORTED:
        assert 2 < len(operators(module, batch)) < 80
        return
    with pytest.raises(Exception, match=NOT_EXPORTED[family.name]):
        operators(module, batch)


@pytest.mark.parametrize("family", REFUSED.values(), ids=list(REFUSED))
def test_a_loss_function_of_several_losses_is_refused_in_one_sentence(family: Family):
    with pytest.raises(JobError, match="Several losses"):
        verified(family, Plan(dp=2))

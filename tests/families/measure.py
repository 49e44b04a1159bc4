"""What is measured of a family: loss and gradients of a step, the ATen operators of its export, data-parallel
equality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.families.family import Family
from tests.families.limits import FLOAT32_ONLY


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


def verified(family: Family, plan: Plan, *, dropout: bool = False, batch_size: int = 3) -> Report:
    """Two steps of the plan on simulated devices against one device, in float64 where the family's code
    allows it."""
    dtype = None if family.name in FLOAT32_ONLY else torch.float64
    report = verify(
        replace(family.make_job(dropout), batch_size=batch_size),
        plan,
        devices="simulated",
        steps=2,
        dtype=dtype,
    )
    assert report is not None
    return report

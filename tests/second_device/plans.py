"""The kinds of plans that are rehearsed on the second device. Who adds one adds a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.job import Evaluate, Job
from tests.jobs import make_job

STEPS = 5
BATCH = 12  # of 36 samples: batches of one size
TOLERANCE = 1e-10  # float64: kernels of the device are the CPU's, but some are chosen otherwise
PARTS_ROUND = 1e-3  # bfloat16, where devices' rates choose other parts


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """kind: what it is an example of. model, optimizer: of `tests/jobs.py`. settings: of the job. waits: that a rank's
    host may have a step, besides those of the job's own code. quick: also in the covering subset of all tests. what: a step, an
    evaluation or a checkpoint. dtype: that the job is turned into; None: its own, so that a precision rounds.
    tolerance: of the largest relative difference from the CPU's values."""

    kind: str
    plan: str
    model: str = "mlp"
    optimizer: str = "sgd"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    waits: int = 1
    quick: bool = False
    what: str = "step"
    dtype: torch.dtype | None = torch.float64
    tolerance: float = TOLERANCE

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what} {self.plan} {self.model} {self.optimizer}"

    @property
    def overlaps(self) -> bool:
        """Whether the device has work when the host waits for the loss: with pp it is known at the end alone, and a loss
        scale waits for all gradients."""
        alone = "pp=" not in self.plan and "fp16" not in self.plan
        return alone and self.what == "step" and self.waits == 1

    def job(self) -> Job:
        """Without dropout: devices draw its masks differently."""
        job = make_job(self.model, self.optimizer, steps=STEPS, batch_size=BATCH, **self.settings)
        build, data = job.model, job.data
        if self.what == "evaluation":
            job = replace(job, evaluate=Evaluate(data, {"size": size_of_outputs}, 10))
        if self.what == "checkpoint":
            job = replace(job, checkpoint_every=1, checkpoint="background")
        return replace(job, model=lambda: without_dropout(build()), data=lambda: three_batches(data()))


PLANS = (
    Rehearsed(kind="one device", plan="dp=1", quick=True),
    Rehearsed(kind="dp", plan="dp=2,microbatches=2", model="gpt"),
    Rehearsed(kind="dp, batch norm", plan="dp=2", model="cnn"),
    Rehearsed(kind="dp, batch norm over replicas", plan="dp=2,sync_batch_norm=true", model="cnn"),
    Rehearsed(kind="dp, unused parameters", plan="dp=2", model="unused_twice", waits=2),
    Rehearsed(kind="dp by messages", plan="dp=2,exchange=ring"),
    Rehearsed(kind="dp, bf16 gradients", plan="dp=2,compress=bf16"),
    Rehearsed(kind="dp, gradients travel in bf16", plan="dp=2,reduce=bf16"),
    Rehearsed(kind="dp, powersgd", plan="dp=2,compress=powersgd:2"),
    Rehearsed(kind="dp, topk", plan="dp=2,compress=topk:0.1"),
    Rehearsed(kind="dp, local steps", plan="dp=2,exchange=local_sgd,local_steps=2"),
    Rehearsed(kind="dp, DiLoCo", plan="dp=2,exchange=diloco,local_steps=2"),
    Rehearsed(kind="dp, server", plan="dp=2,exchange=server"),
    Rehearsed(kind="dp, shares", plan="dp=2,shares=2+1"),
    Rehearsed(kind="zero=1", plan="dp=2,zero=1", quick=True),
    Rehearsed(kind="zero=1, whole parameters", plan="dp=2,zero=1", optimizer="muon"),
    Rehearsed(kind="zero=2", plan="dp=2,zero=2,microbatches=2"),
    Rehearsed(kind="zero=3", plan="dp=2,zero=3,microbatches=2", quick=True),
    Rehearsed(kind="zero=3 within", plan="dp=4,zero=3,zero_within=2"),
    Rehearsed(kind="recompute", plan="dp=1,recompute=full", model="gpt"),
    Rehearsed(kind="recompute", plan="dp=2,recompute=selective,microbatches=2", optimizer="adamw"),
    Rehearsed(kind="tp", plan="tp=2", quick=True),
    Rehearsed(kind="tp", plan="tp=2", model="gpt"),
    Rehearsed(kind="pp, gpipe", plan="pp=2,microbatches=2,schedule=gpipe"),
    Rehearsed(kind="pp, 1f1b", plan="pp=2,microbatches=4,schedule=1f1b", quick=True),
    Rehearsed(kind="pp, interleaved", plan="pp=2,microbatches=4,schedule=interleaved", model="gpt"),
    Rehearsed(kind="pp, zb-h1", plan="pp=2,microbatches=4,schedule=zb-h1"),
    Rehearsed(kind="pp, zb-v", plan="pp=2,microbatches=4,schedule=zb-v", model="gpt"),
    Rehearsed(kind="pp, tied parameters", plan="pp=2,microbatches=2", model="gpt"),
    Rehearsed(kind="product", plan="dp=2,tp=2,zero=1"),
    Rehearsed(kind="product", plan="dp=2,pp=2,microbatches=2,zero=2"),
    Rehearsed(kind="product", plan="dp=2,pp=2,microbatches=2,zero=3", optimizer="adamw"),
    Rehearsed(kind="product", plan="dp=2,pp=2,tp=2,microbatches=2", model="gpt"),
    Rehearsed(kind="loss scale", plan="dp=2,precision=fp16-mixed", quick=True),
    Rehearsed(
        kind="loss scale", plan="dp=2,pp=2,microbatches=2,zero=3,precision=fp16-mixed", optimizer="adamw"
    ),
    Rehearsed(kind="autocast", plan="dp=2,microbatches=2,precision=bf16-mixed", dtype=None, quick=True),
    Rehearsed(kind="autocast", plan="dp=2,zero=3,microbatches=2,precision=bf16-mixed", dtype=None),
    Rehearsed(kind="autocast", plan="tp=2,precision=bf16-mixed", dtype=None, tolerance=PARTS_ROUND),
    Rehearsed(kind="autocast", plan="pp=2,microbatches=4,precision=bf16-mixed", dtype=None),
    Rehearsed(
        kind="autocast", plan="dp=2,recompute=selective,precision=bf16-mixed", optimizer="adamw", dtype=None
    ),
    Rehearsed(kind="autocast, loss scale", plan="dp=2,zero=1,precision=fp16-mixed", dtype=None),
    Rehearsed(kind="bfloat16, masters", plan="dp=2,zero=1,precision=bf16", optimizer="adamw", dtype=None),
    Rehearsed(kind="bfloat16, masters", plan="dp=2,zero=3,precision=bf16", dtype=None),
    Rehearsed(kind="bfloat16, masters", plan="pp=2,microbatches=2,precision=bf16", dtype=None),
    Rehearsed(kind="bfloat16, masters", plan="tp=2,precision=bf16", dtype=None, tolerance=PARTS_ROUND),
    Rehearsed(kind="offload", plan="dp=2,zero=1,offload=optimizer", optimizer="adamw", waits=2),
    Rehearsed(kind="evaluation", plan="dp=2", what="evaluation"),
    Rehearsed(kind="evaluation", plan="pp=2,microbatches=2", what="evaluation"),
    Rehearsed(kind="checkpoint, in the background", plan="dp=2,zero=1", what="checkpoint", waits=0),
)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def three_batches(samples: Any) -> Any:
    """The first samples of a data set once more, so that all batches have one size."""
    return torch.utils.data.ConcatDataset([samples, torch.utils.data.Subset(samples, range(6))])


def size_of_outputs(model: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """A metric."""
    return model(batch["x"]).square().mean()

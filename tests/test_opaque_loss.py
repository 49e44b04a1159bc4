"""A loss function's own code that cannot be read runs as it is, as operators between the model's calls, which are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.call import ChangedCallError
from meshloom.program.opaque.loss_code import LOSS
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.covering import few
from tests.opaque_jobs import Net, Router, job_of

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]
Batch = dict[str, Tensor]
PLANS = ["tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2", "dp=2,pp=2,microbatches=2,schedule=zb-h1,zero=3"]


def branches(model: nn.Module, batch: Batch) -> Tensor:
    wrong = model(batch["x"]).sub(batch["y"]).square()
    return wrong.mean() if wrong.max().item() > 8.0 else 2 * wrong.sum() / wrong.numel()


def hardest(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """As many as values say, and a weight of values."""
    wrong = model(batch["x"]).sub(batch["y"]).square().mean(-1)
    hard = wrong[wrong > wrong.mean()]
    return hard.sum(), torch.tensor(float(len(hard)))


def matched(model: nn.Module, batch: Batch) -> Tensor:
    """Pairs that numpy finds."""
    total = torch.zeros((), dtype=batch["x"].dtype)
    for made, wanted in zip(model(batch["x"]), batch["y"], strict=True):
        order = numpy.argsort(torch.cdist(made, wanted).detach().numpy().sum(1))
        total = total + F.l1_loss(made[torch.from_numpy(order)], wanted)
    return total / len(batch["x"])


def asserts(model: nn.Module, batch: Batch) -> Tensor:
    error = F.mse_loss(model(batch["x"]), batch["y"])
    assert torch.isfinite(error), "the loss is not finite"
    return error


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """It uses parameters beside the model's calls."""
    error = F.mse_loss(model(batch["x"]), batch["y"])
    return error + 1e-2 * model.head.weight.abs().sum() if error.item() < 1e9 else error  # type: ignore[union-attr]


def in_parts(model: Any, batch: Batch) -> Tensor:
    """What a second call of a module is given depends on values, of equal shapes."""
    x = model.embed(batch["x"])
    x = x.sin() if x.sum().item() > 0 else x.cos()
    x = model.blocks[1](model.blocks[0](x))
    return F.mse_loss(model.head(x), batch["y"])


LOSSES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (branches, hardest, matched, asserts, penalised, in_parts)
}


def captured(job: Job) -> Program:
    return CapturedLoss(job).capture(first_batches(job, 2, 8))


def equal(job: Job, plan: str) -> bool:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    return report.passed


@pytest.mark.long
@pytest.mark.slow
def test_modules_that_a_loss_calls_are_read() -> None:
    program = captured(job_of(lambda: Net([Router()]), loss=branches))
    assert sorted(program.opaque) == ["parts.0", LOSS]
    assert (
        sum(node.operator == "linear" for node in program.nodes) == 6
    )  # embed, head, two layers each of two blocks
    assert unpack(pack(program)).digest() == program.digest()


@pytest.mark.covering("0")
@pytest.mark.long
@pytest.mark.parametrize("number", few(range(len(LOSSES)), 3, pytest.mark.slow))
@pytest.mark.slow
def test_losses_equal_one_device(number: int) -> None:
    loss = list(LOSSES.values())[number]
    assert equal(job_of(lambda: Net([], "rr"), loss=loss), PLANS[number % len(PLANS)])


@pytest.mark.slow
def test_a_loss_that_calls_another_module_later_ends_the_step() -> None:
    flag = {"other": False}

    def switches(model: Any, batch: Batch) -> Tensor:
        x = model.embed(batch["x"])
        block = model.blocks[1 if flag["other"] else 0]
        out = model.head(block(x))
        return F.mse_loss(out, batch["y"]) if out.sum().item() < 1e9 else out.sum()

    with Trainer(job_of(lambda: Net([], "rr"), loss=switches), "tp=2", devices="simulated") as trainer:
        batches = iter(trainer.batches())
        trainer.step(next(batches))
        flag["other"] = True
        with pytest.raises(
            ChangedCallError, match=r"called blocks\.1 for this batch where it called blocks\.0"
        ):
            trainer.step(next(batches))


@pytest.mark.long
def test_a_loss_that_fails_is_refused_with_its_line() -> None:
    def fails(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["no such name"])

    with pytest.raises((CaptureError, KeyError), match="no such name"):
        captured(job_of(lambda: Net([], "r"), loss=fails))

"""A line that cannot be read in the forward of a large module, or of the model, leaves the modules that it calls readable: the forward's own code
runs as written between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.planner.describe import describe
from meshloom.planner.divided import divided
from meshloom.planner.readings import Readings
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.loss_code import own_code_of
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.verify.run import verify
from tests.covering import few
from tests.opaque_jobs import LENGTH, WIDTH, Readable, data, job_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]
PLANS = ["tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2", "dp=2,zero=3,tp=2,recompute=full", "dp=2,zero=3"]


class Clamps(nn.Module):
    """Activations that grow too large are halved, between the layers."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.place = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.blocks: Any = nn.ModuleList(Readable(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 3:
                x = x * 0.5
        return self.head(x)


class Wrapped(nn.Module):
    """The line is in a module that is nearly all of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Clamps(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.net(x))


class Teacher(Clamps):
    """A call without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        with torch.no_grad():
            target = self.blocks[1](x)
        if x.abs().max().item() > 2:
            x = x * 0.5
        return self.head(self.blocks[0](x) + target)


class Evaluates(Clamps):
    """It asks whether it trains."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.training and float(x.abs().max()) > 1:
            x = x * 0.5
        return self.head(self.blocks[1](self.blocks[0](x)))


class Chooses(Clamps):
    """A value decides which block runs, and these batches always choose one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.blocks[0](x) if x.mean().item() > 100 else self.blocks[1](x)
        return self.head(x)


class Loops(Clamps):
    """A value decides how often a block runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(min(int(x.abs().max()), 1) + 1):
            x = self.blocks[0](x)
        return self.head(x)


class Sets(Clamps):
    """It leaves something in an attribute, which running it again would leave again."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        x = self.embed(x)
        x = x * 0.5 if x.abs().max() > 3 else x
        return self.head(self.blocks[0](x))


class Draws(Clamps):
    """It draws."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(x), 0.2, self.training)
        x = x * 0.5 if x.abs().max() > 3 else x
        return self.head(self.blocks[0](x))


READ: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "clamps": (Clamps, ""), "wrapped": (Wrapped, "net"), "teacher": (Teacher, ""), "evaluates": (Evaluates, ""),
}  # fmt: skip
WHOLE = {"chooses": Chooses, "loops": Loops, "sets": Sets, "draws": Draws}


def captured(job: Job) -> Program:
    return CapturedLoss(job).capture(first_batches(job, 2, 8))


def equal(job: Job, plan: str) -> bool:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
    assert report is not None
    return report.passed


@pytest.mark.long
def test_modules_that_an_unreadable_forward_calls_are_read() -> None:
    program = captured(job_of(Clamps))
    assert list(program.opaque) == [own_code_of("")]
    assert sum(node.operator == "linear" for node in program.nodes) == 6
    assert unpack(pack(program)).digest() == program.digest()


@pytest.mark.slow
def test_nearly_all_parameters_and_work_are_divided() -> None:
    readings = Readings(job_of(lambda: Clamps(6, 256)))
    (note,) = describe(readings).opaque
    assert note.startswith("the own code of the model runs as written, as one operator that is not divided: ")
    account = divided(readings, Plan.parse("tp=2")).account
    assert account.parameters_divided >= 0.9 and account.flops_divided >= 0.9


@pytest.mark.covering("clamps-tp=2")
@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", READ)
@pytest.mark.slow
def test_a_model_with_an_unreadable_line_equals_one_device(name: str, plan: str) -> None:
    model, path = READ[name]
    job = job_of(model, evaluate=ml.Evaluate(data=data, metrics={"error": error}, every=2))
    if "tp" in plan or "pp" in plan:
        assert list(captured(job).opaque) == [own_code_of(path)]
    assert equal(job, plan)


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("name", few(WHOLE, 1, pytest.mark.slow))
@pytest.mark.long
def test_code_whose_calls_may_change_runs_with_all_that_it_calls(name: str) -> None:
    """It would be called again for each of its calls, and training would end in the batch in which it calls another."""
    assert list(captured(job_of(WHOLE[name])).opaque) == [""]

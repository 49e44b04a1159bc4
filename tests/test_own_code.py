"""A line that cannot be read in the forward of a large module, or of the model, leaves the modules that it calls readable: the forward's own code
runs as written between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from meshloom.program.capture import steady_calls
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.loss_code import LOSS, own_code_of
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.replica.buffers.written_by_loss import written_by_loss
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
def test_code_whose_calls_may_change_runs_with_all_that_it_calls(name: str) -> None:
    """It would be called again for each of its calls, and training would end in the batch in which it calls another."""
    assert list(captured(job_of(WHOLE[name])).opaque) == [""]


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_such_code_equals_one_device(name: str) -> None:
    assert equal(job_of(WHOLE[name]), "dp=2,tp=2")


def halves(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the head is given is what the embedding returned, in all batches but the last."""
    x = model.embed(batch["x"])
    if x.abs().max().item() > 50:
        x = x * 0.5
    return F.mse_loss(model.head(x), batch["y"])


def last_batch_larger() -> list[dict[str, Tensor]]:
    return [{**each, "x": each["x"] * (1000 if row >= 16 else 1)} for row, each in enumerate(data())]


@pytest.mark.slow
def test_code_that_handed_a_tensor_on_may_change_it_in_a_later_batch() -> None:
    """The program had no operator there: what the code does in the last batch was not done, and nothing was said."""
    job = replace(job_of(lambda: Clamps(0), loss=halves), data=last_batch_larger, shuffle=False)
    assert list(captured(job).opaque) == [LOSS]
    assert equal(job, "tp=2")


def rarely(g: Tensor) -> Tensor:
    """Changes what is large, as gradients of the last batch are."""
    return g / 2 if g.norm() > 10 else g


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return rarely(gradient)


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(rarely)
    return x


class HooksResult(Clamps):
    """Each run of the code hooks the same result."""

    def forward(self, x: Tensor) -> Tensor:
        x = hooked(self.embed(x))
        return self.head(self.blocks[1](self.blocks[0](x * 2)))


class HooksHanded(Clamps):
    """It hands on what it has hooked."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](hooked(self.embed(x))))


class HooksSum(Clamps):
    """A gradient comes from two of its calls."""

    def forward(self, x: Tensor) -> Tensor:
        x = hooked(self.embed(x) + self.place)
        return self.head(self.blocks[1](self.blocks[0](x) + x))


class HooksAfter(Clamps):
    """The hook is there after the call that uses the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        y = self.blocks[0](x)
        hooked(x)
        return self.head(y)


class ClipsOnce(Clamps):
    """One run's gradient goes through its function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](Clipped.apply(self.embed(x))))


class ClipsSum(Clamps):
    """The residual path takes what its function returned to all layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = Clipped.apply(self.embed(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


HOOKED: dict[type[nn.Module], str] = {
    HooksResult: own_code_of(""), HooksHanded: own_code_of(""), ClipsOnce: own_code_of(""),
    HooksSum: "", HooksAfter: "", ClipsSum: "",
}  # fmt: skip


@pytest.mark.parametrize("kind", few(HOOKED, 2, pytest.mark.slow))
@pytest.mark.slow
def test_a_gradient_that_code_changes_is_changed_once(kind: type[nn.Module]) -> None:
    """In the last batch it was changed by each run of the code, or in parts, or not at all, and nothing was said."""
    job = replace(job_of(kind, loss=doubled), data=last_batch_larger, shuffle=False)
    assert list(captured(job).opaque) == [HOOKED[kind]]
    assert equal(job, "tp=2")


def doubled(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum(-1).mean()


def test_other_calls_are_found_where_a_result_is_hooked() -> None:
    """A tensor without gradients cannot be hooked: the trial with other values failed there and told nothing."""
    assert list(captured(job_of(HooksAndChooses)).opaque) == [""]


class HooksAndChooses(Clamps):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x.register_hook(rarely)
        return self.head(self.blocks[int((x > 1e3).any())](x))


@pytest.mark.slow
def test_code_that_runs_long_is_not_tried_with_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over boxes that asks for each was run a hundred times, for each shape of a batch: minutes."""
    monkeypatch.setattr(steady_calls, "MOST_RUN", 40)
    assert list(captured(job_of(Clamps)).opaque) == [""]


def _one_more(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result + 1


class Listens(nn.Module):
    """Its first forward adds a hook, as in libraries that record outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "listens", False):
            self.linear.register_forward_hook(_one_more)
            self.listens = True
        return self.linear(x)


def test_looking_at_what_a_loss_writes_leaves_no_hook() -> None:
    """The attribute that says that it was added was taken back, so that training added it a second time."""
    model, x = Listens(), torch.randn(4, 3)
    expected = model.linear(x) + 1
    written_by_loss(model, lambda number: [model(x).sum()], nullcontext)
    assert torch.equal(model(x), expected)

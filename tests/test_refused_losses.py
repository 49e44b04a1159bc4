"""What is no operator even as a whole is refused before the first step under tp, pp and recomputation, by its line and with the ways out."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.planner.advise import advise
from meshloom.planner.describe import describe
from meshloom.planner.pricing import Devices
from meshloom.planner.readings import Readings
from meshloom.telemetry.progress import QUIET
from tests.jobs_in_memory import integers, job_of, normal
from tests.rehearsals import machine

pytestmark = pytest.mark.usefixtures("silent_export")
LINE = r"test_refused_losses.py:\d+ \(at = int\(random.random\(\) \* 6\)"


class Cut(nn.Module):
    """A number that Python draws is where its input is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        at = int(random.random() * 6)
        return self.two(torch.tanh(self.one(torch.cat([x[:, at:], x[:, :at]], 1))))


def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def by_numpy(model: Any, b: dict[str, Tensor]) -> Tensor:
    scores = model(b["x"])
    worst = torch.as_tensor(scores.detach().numpy().argmin(1))
    return F.cross_entropy(scores, b["y"]) - scores[:, worst].mean()


def job(model: Any = Cut, **settings: Any) -> ml.Job:
    x, y = normal(1, 7), integers(2, 5)
    return job_of(model, loss, [{"x": x[row], "y": y[row]} for row in range(len(x))], **settings)


def readable() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))


def hooked() -> nn.Module:
    model = readable()
    next(model.parameters()).register_hook(lambda gradient: 0.5 * gradient)
    return model


class Named(Tensor):
    """A tensor of a class of its own."""


class Classed(Cut):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.as_subclass(Named)))).as_subclass(Tensor)


class Spectrum(Cut):
    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.one(x))
        kept = torch.zeros_like(waves)
        kept[:, 1] = 2 * waves[:, 1]
        return self.two(torch.fft.irfft(kept, n=9))


def nested(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    parts = [row["x"][: 3 + number % 4] for number, row in enumerate(rows)]
    return {"x": torch.nested.nested_tensor(parts, layout=torch.jagged), "y": torch.stack([row["y"] for row in rows])}  # fmt: skip


def quasi_newton(named: ml.NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([each for _, each in named])


@pytest.mark.parametrize(
    "plan", ["tp=2", "dp=2,recompute=full", *(pytest.param(each, marks=pytest.mark.long) for each in ("pp=2", "dp=2,zero=3,tp=2"))]
)  # fmt: skip
def test_a_loss_that_cannot_be_captured_is_refused_with_its_line_and_the_ways_out(plan: str) -> None:
    with pytest.raises(ml.MeshloomError) as refused:
        ml.Trainer(job(), plan, devices="simulated", listener=QUIET)
    said = str(refused.value)
    assert refused.value.exit_code == 2 and re.search(LINE, said), said
    assert "Job(leaves=[...])" in said and "@ml.leaf" in said
    assert said.endswith("Plans with dp and zero alone run the module as it is and need no program.")


def test_a_loss_that_reads_a_tensor_as_an_array_is_one_whose_values_decide() -> None:
    by_values = r"depends on the values in the batch at .*:\d+ \(worst = torch.as_tensor\(scores.detach\(\).numpy\(\).*\), so no one program computes it"
    with pytest.raises(ml.MeshloomError, match=by_values):
        ml.Trainer(replace(job(readable), loss=by_numpy), "tp=2", devices="simulated", listener=QUIET)


@pytest.mark.parametrize(
    ("what", "plan", "sentence"),
    [
        (job(hooked), "tp=2", r"0.weight has a hook on its gradient \(register_hook\)"),
        (job(Classed), "tp=2", r"The loss could not be captured at .*\(return self.two\(torch.tanh.*: RuntimeError: .* Move the line into a function marked with"),
        (job(Spectrum), "tp=2", r"aten.select_scatter.default at .*\(kept\[:, 1\] = .* could not run without values"),
        (job(readable, collate=nested), "tp=2", "The batch holds x, a nested tensor, whose parts have other lengths in every batch"),
    ],
    ids=["hook", "class of tensors", "complex slice", "nested batch"],
)  # fmt: skip
@pytest.mark.long
def test_so_is_what_is_no_operator_of_a_program(what: ml.Job, plan: str, sentence: str) -> None:
    with pytest.raises(ml.MeshloomError, match=sentence) as refused:
        ml.Trainer(what, plan, devices="simulated", listener=QUIET)
    assert refused.value.exit_code == 2


@pytest.mark.long
def test_description_refuses_it_too_and_says_what_zero_divides() -> None:
    with pytest.raises(ml.MeshloomError, match=LINE):
        describe(Readings(job()))
    closures = Readings(job(readable, optimizer=quasi_newton))
    plan, notes = closures.runs(ml.Plan.parse("dp=2,zero=1"))
    assert str(plan) == "dp=2" and notes[0].endswith("zero=1 divides nothing.")
    with pytest.raises(ml.MeshloomError, match="with pp=2 no rank has them all"):
        closures.runs(ml.Plan.parse("pp=2"))


@pytest.mark.long
def test_advice_prices_what_needs_no_program() -> None:
    here = Devices(num_ranks=2, machine=machine(), threads_of=lambda ranks: 1, common_memory=True)
    found = advise(job(), here)
    assert found.recommended is not None
    assert all(each.plan.tp == each.plan.pp == 1 for each in found.options)
    assert any("tp=2" in plan and re.search(LINE, why) for plan, why in found.refused.items())
    with pytest.raises(ml.MeshloomError, match=LINE):
        advise(replace(job(), seed=1), here, plans=[ml.Plan.parse("tp=2")])

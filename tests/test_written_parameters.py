"""Parameters that no gradient trains and that the loss writes (a teacher's moving average) follow the rule that the
job declares under every plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.errors import JobError, MeshloomError
from meshloom.program.ir.parameter_writes import untrained_write
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.covering import marked
from tests.teacher_jobs import JOBS, in_place, teacher_job
from tests.verified import equals_one_device

PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"]
TOLERANCE: Any = {"rtol": 1e-10, "atol": 1e-11}  # float64, other orders of sums


def trained(name: str, plan: str) -> dict[str, Tensor]:
    """Full state after all steps, in float64."""
    with Trainer(JOBS[name](), plan, devices="simulated", dtype=torch.float64, listener=QUIET) as trainer:
        trainer.fit()
        return {key: each.clone() for key, each in trainer.together(full_state)[0].items()}


USUAL = [("first, in place", "dp=2"), ("first, new data", "dp=2,zero=3")]
OFTEN = [("last, in place", "pp=2,microbatches=2"), ("in the forward", "tp=2")]


@pytest.mark.long
@pytest.mark.covering("first, in place", "first, new data")
@pytest.mark.parametrize(("name", "plan"), marked(USUAL, OFTEN, product(JOBS, PLANS)))
def test_a_teacher_is_one_device_s(name: str, plan: str) -> None:
    """Replicas had teachers of their own, under dp, without a word; tp and pp refused the loss."""
    equals_one_device(JOBS[name](), plan, steps=3)


def test_a_teacher_that_is_written_later_is_an_error() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        if ml.step() >= 2:
            in_place(model.teacher, model.student)
        return F.cross_entropy(model.student(batch["x"]) + model.teacher(batch["x"]), batch["y"])

    with (
        Trainer(teacher_job(loss, buffers={}), "dp=2", devices="simulated", listener=QUIET) as trainer,
        pytest.raises(JobError, match=r"teacher\.first\.weight and 3 more are not trained"),
    ):
        trainer.fit()


@pytest.mark.parametrize("plan", [*PLANS, "microbatches=3", "dp=2,tp=2,zero=3"])
@pytest.mark.parametrize("name", ["last, in data", "first, new data"])
def test_a_teacher_without_a_rule_is_refused_with_what_to_write(name: str, plan: str) -> None:
    """Also where it begins as a copy of its student, and is written around torch's count."""
    pattern = "first" if plan == "dp=2,zero=3" else ""  # units hold the teacher's layers one by one
    text = rf'chunks of a step write (it|them): Job\(buffers={{"teacher\.{pattern}'
    with (
        pytest.raises(MeshloomError, match=text),  # a job's, or a capture's on other ranks
        Trainer(replace(JOBS[name](), buffers={}), plan, devices="simulated", listener=QUIET) as trainer,
    ):
        trainer.step(next(trainer.batches()))


@pytest.mark.processes
def test_replicas_that_share_parameters_have_teachers_of_their_own() -> None:
    """With one copy for all replicas of a host the teacher was an error."""
    state = trained("last, in place", "dp=2")
    for found in on_ranks(_on_processes, 2):
        for name, each in found.items():
            torch.testing.assert_close(state[name], each, **TOLERANCE)


def _on_processes() -> dict[str, Tensor]:
    with Trainer(
        JOBS["last, in place"](), "dp=2", devices="cpu", dtype=torch.float64, listener=QUIET
    ) as trainer:
        trainer.fit()
        return {name: each.clone() for name, each in trainer.replicas[0].model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2,zero=3", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_a_run_with_a_teacher_goes_on(plan: str, tmp_path: Path) -> None:
    name = "last, in place"
    for steps, the_plan, more in (
        (1, "dp=2", {}),
        (2, plan, {"resume": tmp_path / "1"}),
        (3, "dp=2", {"resume": tmp_path / "2"}),
    ):
        job = replace(JOBS[name](), steps=steps, batch_size=6)
        with Trainer(
            job,
            the_plan,
            devices="simulated",
            dtype=torch.float64,
            listener=QUIET,
            out=tmp_path / str(steps),
            **more,
        ) as trainer:
            trainer.fit()
            state = {key: each.clone() for key, each in trainer.together(full_state)[0].items()}
    expected = trained(name, "dp=2")
    if plan == "dp=2,zero=3":  # with tp=2 a step has one chunk
        for key, each in expected.items():
            torch.testing.assert_close(state[key], each, **TOLERANCE)


def test_parameters_without_a_common_module_have_a_rule_each() -> None:
    said = str(untrained_write(["scale", "teacher.first.weight", "teacher.bias"]))
    assert said.startswith("scale and 2 more are not trained, and a step writes them.")
    assert 'Job(buffers={"scale": ml.ema(0.99), "teacher.*": ml.ema(0.99)})' in said


class Follows(nn.Module):
    """A teacher that begins as a copy, so that its first values after a write are those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(7, 5)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.detach().data, alpha=0.5)
        return self.student(x) + self.teacher(x)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_a_copy_that_follows_is_found_in_the_second_step(plan: str) -> None:
    data = [{"x": torch.randn(7), "y": torch.tensor(k % 5)} for k in range(16)]
    job = ml.Job(
        model=Follows, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), data=lambda: data,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), batch_size=4, steps=4,
    )  # fmt: skip
    with (
        Trainer(job, plan, devices="simulated", listener=QUIET) as trainer,
        pytest.raises(JobError, match=r"teacher.* not trained, and a step writes"),
    ):
        trainer.fit()
    assert trainer.next_step <= 1

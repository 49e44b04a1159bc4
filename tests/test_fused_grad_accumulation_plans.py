"""Divided plans and pipelines whose weights' gradients land in their buckets equal one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import meshloom.pipeline.runtime.stage
import tests.pipelines
from meshloom.core.plan import Plan
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.program.ir.program import Program
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator, GradAccumulator, GradBuffer
from meshloom.program.run.with_fused_accumulation import FusedLinear, with_fused_accumulation
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.families import FAMILIES
from tests.jobs import make_job
from tests.pipelines import evenly, run_pipeline, subject_of
from tests.reports import largest_error

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "small_layers_fused")]
PINS = {"gpt": {"blocks.*.qkv": "heads"}, "unused_twice": {"first": "column"}}


@pytest.fixture
def small_layers_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are tiny, and their layers too small for it to pay."""

    def fuse_all(program: Program, accumulator: GradAccumulator, *, min_elements: int = 0) -> Program:
        return with_fused_accumulation(program, accumulator, min_elements=0)

    monkeypatch.setattr(meshloom.pipeline.runtime.stage, "with_fused_accumulation", fuse_all)


@pytest.mark.covering("unused_twice-dp=2,tp=2")
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param("gpt", "tp=2,microbatches=3", marks=pytest.mark.slow),
        pytest.param("gpt", "dp=2,tp=2,microbatches=2", marks=pytest.mark.slow),
        ("gpt", "dp=2,tp=2,microbatches=2,zero=1,overlap=false"),
        ("unused_twice", "dp=2,tp=2,microbatches=2,zero=1"),
        ("unused_twice", "dp=2,tp=3,overlap=false"),
    ],
)
def test_a_divided_plan_equals_one_device(model: str, plan: str):
    divided = replace(Plan.parse(plan), tp_placements=PINS[model])
    report = verify(make_job(model, "adamw"), divided, devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    assert report.passed, report.causes
    assert largest_error(report) < 1e-10


@pytest.mark.slow
def test_gradients_that_are_added_up_over_tp_equal_one_device():
    # 6 heads in 2 groups on 4 ranks: keys and values of a group lie on two ranks, whose gradients are parts
    # of one sum.
    # q, k and v are run together with the sum of their input's gradient.
    plan = Plan(dp=2, tp=4, microbatches=2, tp_placements={"model.layers.*.self_attn.*": "heads"})
    report = verify(FAMILIES["llama"].make_job(True), plan, devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    assert report.passed, report.causes


@pytest.mark.slow
def test_in_a_plan_with_several_chunks_the_weights_of_linear_layers_are_made_in_the_bucket(
    monkeypatch: pytest.MonkeyPatch,
):
    accumulated: dict[int, bool] = {}
    add = DirectAccumulator.add

    def seen(
        self: DirectAccumulator, weight: Tensor | None, bias: Tensor | None, rows: Tensor, inputs: Tensor
    ) -> None:
        add(self, weight, bias, rows, inputs)
        assert weight is not None and weight.grad is not None
        # a piece of something larger
        accumulated[id(weight)] = weight.grad.untyped_storage().nbytes() > weight.nbytes

    monkeypatch.setattr(DirectAccumulator, "add", seen)
    for plan, accumulates in (
        ("dp=2,tp=2", True),
        ("dp=2,tp=2,zero=1", True),
        ("tp=2,microbatches=2", False),
        ("tp=2", None),
    ):
        accumulated.clear()
        with Trainer(
            make_job("gpt", "sgd"), f"{plan},tp_placements=blocks.*.qkv:heads", devices="simulated"
        ) as trainer:
            trainer.step(next(iter(trainer.batches())))
            division = trainer.replicas[0].engine.division
            assert division is not None
            model: Any = trainer.replicas[0].model
            # the head's weight is changed before it is used
            layers = [each for each in model.blocks.modules() if isinstance(each, nn.Linear)]
            plain = division.first.programs[0]
            # what ranks compare and verification runs
            assert not any(isinstance(node.target, FusedLinear) for node in plain.nodes)
        expected = {} if accumulates is None else {id(each.weight): accumulates for each in layers}
        assert {
            key: value for key, value in accumulated.items() if key in {id(each.weight) for each in layers}
        } == expected


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_pipelines_gradients_land(schedule: str, monkeypatch: pytest.MonkeyPatch):
    """Also those that come after their microbatch's backward, and of weights that two stages share."""
    job = make_job("gpt", "sgd")
    data = job.data()
    subject = subject_of(
        job,
        [default_collate([data[3 * start + each] for each in range(2 + start % 2)]) for start in range(4)],
    )
    grad_buffers: dict[int, Tensor] = {}
    parameters: list[Tensor] = []

    def grad_buffer(parameter: Tensor) -> GradBuffer:
        parameters.append(parameter)
        return GradBuffer(
            tensor=grad_buffers.setdefault(id(parameter), torch.full_like(parameter, float("nan")).detach()),
            filled=False,
        )

    stage: Any = partial(tests.pipelines.StageRun, accumulator=DirectAccumulator(grad_buffer))
    monkeypatch.setattr(tests.pipelines, "StageRun", stage)
    ran = run_pipeline(subject, make_schedule(schedule, 2, 4), evenly)
    assert ran.error <= 1e-10, ran.what
    assert len(parameters) > 10
    tied = [each for each in parameters if each.shape[0] == 29]
    assert tied and all(each.grad is grad_buffers[id(each)] for each in parameters if each.shape[0] != 29)

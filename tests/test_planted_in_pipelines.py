"""Silent bugs of pipelines, planted one at a time into the product: verification flags every one, and flags
no run without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshloom.optimizer.updater
import meshloom.pipeline.runtime.stage
import meshloom.program.ir.draws
from meshloom.core.errors import TrainingError
from meshloom.core.plan import Plan
from meshloom.parameters.pipeline_ownership import PipelineOwnership
from meshloom.pipeline.runtime.gradient_readiness import Readiness
from meshloom.pipeline.runtime.stage import StageRun
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def tied_gradient_stays(patch: Patch) -> None:
    """Who borrows a parameter keeps its gradient for itself."""
    patch.setattr(PipelineOwnership, "return_gradients", lambda self, parameters: iter(()))


def tied_gradient_overwrites(patch: Patch) -> None:
    returned = PipelineOwnership.return_gradients

    def overwrite(self: PipelineOwnership, parameters: Any) -> Any:
        for name in self.lent:
            if self.owns(name):
                parameters[name].grad = None
        yield from returned(self, parameters)

    patch.setattr(PipelineOwnership, "return_gradients", overwrite)


def borrowed_value_stays(patch: Patch) -> None:
    """The head goes on with the embedding of the step before."""
    patch.setattr(PipelineOwnership, "lend", lambda self, *lent: iter(()))


def last_gradient_only(patch: Patch) -> None:
    """Of a value that went to several stages, the gradient of one of them counts."""

    def replace_gradients(self: StageRun, microbatch: int, gradients: Any) -> None:
        self._live[microbatch].gradients.update(gradients)

    patch.setattr(StageRun, "receive_gradients", replace_gradients)


def statistics_stay(patch: Patch) -> None:
    rerun = StageRun.rerun

    def forgetful(self: StageRun, microbatch: int) -> Any:
        kept = {name: each.clone() for name, each in self._buffers.items() if not each.is_meta}
        values = rerun(self, microbatch)
        with torch.no_grad():
            for name, each in kept.items():
                self._buffers[name].copy_(each)
        return values

    patch.setattr(StageRun, "rerun", forgetful)


def draws_from_the_start(patch: Patch) -> None:
    """Every stage numbers its draws from 0."""
    patch.setattr(meshloom.program.ir.draws, "pass_over_draws", pass_over_nothing)


def pass_over_nothing(count: int) -> None:
    """In place of `pass_over_draws`."""


def ready_too_early(patch: Patch) -> None:
    """Gradients leave after the first microbatch's backward."""
    init = Readiness.__init__

    def early(
        self: Readiness, schedule: Any, rank: int, parameters: Any, ready: Any, **settings: Any
    ) -> None:
        init(self, schedule, rank, parameters, ready, **settings)
        backwards = [action for action in schedule.actions[rank] if action.kind == "B"]
        self._last = set({action.stage: action for action in reversed(backwards)}.values())

    patch.setattr(Readiness, "__init__", early)


def weights_of_one_microbatch_lost(patch: Patch) -> None:
    weights = StageRun.weight_gradients

    def lose(self: StageRun, microbatch: int) -> Any:
        if microbatch == 1:
            self._live.pop(microbatch)
            return {}
        return weights(self, microbatch)

    patch.setattr(StageRun, "weight_gradients", lose)


def norm_of_own_stage(patch: Patch) -> None:
    """Each stage clips by the norm of its own parameters."""
    clip = meshloom.optimizer.updater.clip

    def own(*args: Any, holders: Any = (), **settings: Any) -> Any:
        return (yield from clip(*args, holders=holders[:-1], **settings))

    patch.setattr(meshloom.optimizer.updater, "clip", own)


def microbatches_mixed_up(patch: Patch) -> None:
    """Stage 1 gets the activations of microbatch 1 again, where those of 2 belong."""
    receive = StageRun.receive
    seen: dict[int, dict[str, Tensor]] = {}

    def repeat(self: StageRun, microbatch: int, values: Any) -> None:
        if microbatch == 1:
            seen[id(self)] = dict(values)
        receive(self, microbatch, seen[id(self)] if microbatch == 2 else values)

    patch.setattr(StageRun, "receive", repeat)


GPT, TWICE, CNN, MLP = ("gpt", "sgd"), ("unused_twice", "adamw"), ("cnn", "sgd"), ("mlp", "sgd")
TWO, GRID, SPLIT, FOLDED = (
    "pp=2,microbatches=3",
    "dp=2,pp=2,tp=2,microbatches=2",
    "pp=2,microbatches=4,schedule=zb-h1",
    "pp=2,microbatches=2,schedule=zb-v",
)
BUGS: list[tuple[Plant, list[tuple[tuple[str, str], str]]]] = [
    (tied_gradient_stays, [(GPT, TWO), (("gpt", "adamw"), GRID)]),
    (tied_gradient_overwrites, [(GPT, TWO), (GPT, GRID)]),
    (borrowed_value_stays, [(GPT, TWO), (("gpt", "muon"), GRID)]),
    (last_gradient_only, [(GPT, "pp=6,microbatches=2"), (("gpt", "adamw"), "pp=8")]),
    (statistics_stay, [(CNN, TWO), (("cnn", "adamw"), "dp=2,pp=2")]),
    (draws_from_the_start, [(GPT, TWO), (("gpt", "adamw"), FOLDED)]),
    (ready_too_early, [(MLP, "dp=2,pp=2,microbatches=2"), (CNN, "dp=2,pp=2,microbatches=3"), (GPT, GRID)]),
    (weights_of_one_microbatch_lost, [(GPT, SPLIT), (MLP, SPLIT)]),
    (norm_of_own_stage, [(MLP, TWO), (GPT, GRID), (CNN, SPLIT)]),
    (microbatches_mixed_up, [(MLP, TWO), (GPT, TWO), (CNN, SPLIT)]),
]
CASES = [
    pytest.param(
        plant,
        *job,
        plan,
        id=f"{plant.__name__}-{'-'.join(job)}-{plan}",
        marks=[pytest.mark.slow] if number else [],
    )
    for plant, cases in BUGS
    for number, (job, plan) in enumerate(cases)
]


def run(model: str, optimizer: str, plan: str) -> Report:
    report = verify(make_job(model, optimizer, batch_size=13), Plan.parse(plan), devices="simulated", steps=2)
    assert report
    return report


@pytest.mark.covering("tied_gradient_overwrites", "norm_of_own_stage", "microbatches_mixed_up")
@pytest.mark.parametrize(("plant", "model", "optimizer", "plan"), CASES)
def test_a_planted_bug_is_caught(plant: Plant, model: str, optimizer: str, plan: str, monkeypatch: Patch):
    plant(monkeypatch)
    try:
        report = run(model, optimizer, plan)
    except TrainingError as error:  # what comes after it was sent is refused before verification can see it
        if plant is ready_too_early and "arrived again after it had been sent" in str(error):
            return
        raise
    assert not report.passed
    assert any(not step.passed for step in report.steps)


@pytest.mark.covering("gpt-adamw")
@pytest.mark.parametrize(
    ("model", "optimizer", "plan"),
    [
        pytest.param(*case, marks=[] if number % 5 == 0 else [pytest.mark.slow])
        for number, case in enumerate(sorted({(*job, plan) for _, cases in BUGS for job, plan in cases}))
    ],
)
def test_without_a_bug_the_same_runs_pass(model: str, optimizer: str, plan: str):
    report = run(model, optimizer, plan)
    assert report.passed and not report.causes, report.causes

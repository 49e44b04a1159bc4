"""Schedulers that evaluations step: equal to a plain loop under every plan, resumed, verified."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import meshloom as ml
from meshloom.core.errors import JobError, PlanError
from meshloom.train.evaluation import TeamEvaluation
from meshloom.train.synchronous import SynchronousRun
from tests.jobs import class_loss, vectors
from tests.logging_jobs import in_a_plain_loop, logging_job
from tests.verified import equals_one_device, report_on

QUIET = ml.Listener(started=str, note=str)


def score(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """It is best after step 2 and not better after 4 and 6, nor after the last step, which is not due."""
    return torch.as_tensor(ml.step() > 2).float() + 0.0 * batch["x"].sum()


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def every_two(**overrides: Any) -> ml.Evaluate:
    metrics = {"score": score, "loss": class_loss}
    given: dict[str, Any] = {"metrics": metrics, "every": 2, "scheduler": ml.ByMetric(plateau, "score")}
    return ml.Evaluate(data=vectors, **{**given, **overrides})


def job(**overrides: Any) -> ml.Job:
    return logging_job(**{"loss": class_loss, "steps": 7, "evaluate": every_two(), **overrides})


def trained(the_job: ml.Job, plan: str, **arguments: Any) -> dict[int, list[float]]:
    """The learning rates of all ranks after each evaluation, by steps done."""
    rates: dict[int, list[float]] = {}

    def evaluated(step: int, metrics: dict[str, float]) -> None:
        rates[step] = [rate for each in trainer.replicas for rate in each.updater.learning_rates()]

    listener = replace(QUIET, evaluated=evaluated)
    with ml.Trainer(the_job, plan, dtype=torch.float64, listener=listener, **arguments) as trainer:
        trainer.fit()
    return rates


def in_halves(rates: dict[int, list[float]]) -> dict[int, list[float]]:
    """Rates of 0.1 as the number of times they were halved; one for equal ranks."""
    return {step: sorted({0.1 / each for each in of_ranks}) for step, of_ranks in rates.items()}


@pytest.mark.long
@pytest.mark.covering("dp=2,zero=1")
@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,exchange=server"]
)
def test_an_evaluation_that_is_due_steps_it_in_all_ranks(plan: str):
    """After step 7, the last, there is an evaluation that is not due."""
    assert in_halves(trained(job(), plan)) == {2: [1.0], 4: [2.0], 6: [4.0], 7: [4.0]}


def test_a_run_equals_a_plain_loop():
    """The loss over all 30 samples rises by the rule "max", so that rates fall in each evaluation after the first."""
    made: list[Any] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(named, lr=0.1))
        return made[-1]

    def by_loss(optimizer: Any) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, "max", patience=0)

    the_job = replace(job(evaluate=every_two(scheduler=ml.ByMetric(by_loss, "loss"))), optimizer=optimizer)
    with ml.Trainer(the_job, "dp=2", listener=QUIET) as trainer:
        trainer.fit()
        weights = dict(trainer.replicas[0].model.state_dict())
        assert trainer.replicas[0].updater.learning_rates() == pytest.approx([0.001])
    schedulers: list[ReduceLROnPlateau] = []
    steps: list[int] = []

    def step_by_hand(model: nn.Module, batch: dict[str, Tensor]) -> None:
        schedulers.append(by_loss(made[-1])) if not schedulers else None
        if len(steps) in (2, 4, 6):
            with torch.no_grad():
                schedulers[0].step(float(class_loss(model, vectors().fields)))
        steps.append(len(steps))

    alone = in_a_plain_loop(the_job, step_by_hand)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(weights[name].cpu(), value, rtol=1e-5, atol=1e-6)  # sums in other orders


@pytest.mark.slow
def test_a_run_that_ends_between_evaluations_goes_on_as_one_that_does_not(tmp_path: Path):
    """After 5 steps there is an evaluation that is not due; resumed under another plan, 6 is the third that is."""
    trained(job(), "dp=2", steps=5, out=tmp_path)
    rates = trained(job(), "pp=2,microbatches=2", out=tmp_path, resume=tmp_path)
    assert in_halves(rates) == {6: [4.0], 7: [4.0]}


def test_an_evaluation_in_a_loop_of_one_s_own_steps_it():
    with ml.Trainer(job(), "dp=2", listener=QUIET) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            trainer.evaluate()
        rates = trainer.replicas[1].updater.learning_rates()
    assert rates == pytest.approx([0.1 / 2**6])  # all but the first are no better


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2", "pp=2,microbatches=2"])
@pytest.mark.slow
def test_it_is_verified(plan: str):
    """With the evaluation, the checkpoint and what is resumed from it."""
    found = equals_one_device(job(), plan, quick=False, steps=3)
    assert any("checkpoint" in each.what for each in found.between)


@pytest.mark.slow
def test_ranks_that_do_not_step_it_differ_from_one_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TeamEvaluation, "step_schedulers", lambda *_: None)
    found = report_on(job(), "dp=2", quick=False, steps=3)
    assert not found.passed
    facts = [fact for each in found.between for fact in each.facts]
    assert "last_epoch of scheduler 0 is 0 in the checkpoint and 1 on one device." in facts


@pytest.mark.slow
def test_what_training_does_after_its_last_step_is_verified(monkeypatch: pytest.MonkeyPatch):
    """The evaluation there is not due and leaves schedulers as they are; what is best is kept beside the other checkpoint."""
    ends = job(evaluate=every_two(every=50, best="loss:min"))
    found = equals_one_device(ends, "dp=2", quick=False, steps=3)
    assert [each.what.partition(" after")[0] for each in found.between][:4] == [
        "the evaluation", "the checkpoint of a run that ends with an evaluation that is not due,", "the checkpoint",
        "the checkpoint of the best evaluation,",
    ]  # fmt: skip
    right = SynchronousRun.evaluate
    with monkeypatch.context() as planted:
        planted.setattr(SynchronousRun, "evaluate", lambda run, *, due: right(run, due=True))
        found = report_on(ends, "dp=2", quick=False, steps=3)
        assert not found.passed
        wrong = next(each for each in found.between if not each.passed)
        assert "an evaluation that is not due" in wrong.what and " scheduler 0 " in wrong.facts[0]
    with monkeypatch.context() as planted:
        planted.setattr("meshloom.train.synchronous._keep_best", lambda *_: False)
        found = report_on(ends, "dp=2", quick=False, steps=3)
        assert not found.passed
        assert any("best/ does not have it" in fact for each in found.between for fact in each.facts)


def test_it_is_stepped_with_a_function_of_the_metric():
    """A perplexity, of which a threshold of its own is meant: losses of 1.9, 1.8 and 1.7 fall by less than 0.5, their exponentials by more."""

    def falls(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return 2.0 - 0.05 * torch.as_tensor(ml.step()).double() + 0.0 * batch["x"].sum()

    def by(of: Callable[[float], float] | None) -> dict[int, list[float]]:
        schedule = ml.ByMetric(
            lambda optimizer: ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.5, threshold_mode="abs"
            ),
            "falls",
            of,
        )
        return in_halves(
            trained(job(evaluate=every_two(metrics={"falls": falls}, scheduler=schedule)), "dp=2")
        )

    assert by(math.exp) == {2: [1.0], 4: [1.0], 6: [1.0], 7: [1.0]}
    assert by(None) == {2: [1.0], 4: [2.0], 6: [4.0], 7: [4.0]}


def test_mistakes_are_one_sentence():
    sgd = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(JobError, match=r"'f1'\) must name one of Evaluate's metrics, 'score', 'loss'\."):
        every_two(scheduler=ml.ByMetric(plateau, "f1"))
    with pytest.raises(JobError, match=r"must be a ByMetric, like ml\.ByMetric\(.*, 'score'\)\."):
        every_two(scheduler=plateau)
    with pytest.raises(JobError, match=r"of=\.\.\.\) is called with \(value\), and this function takes \(\)"):
        ml.ByMetric(plateau, "loss", lambda: 1.0)  # pyright: ignore[reportArgumentType]
    for of_optimizer, what in {
        lambda optimizer: 0.1: "returned a float, which is no scheduler whose",
        lambda optimizer: ReduceLROnPlateau(sgd): "a ReduceLROnPlateau of another optimizer",
    }.items():
        by_it = every_two(scheduler=ml.ByMetric(of_optimizer, "loss"))
        with pytest.raises(JobError, match=what), ml.Trainer(job(evaluate=by_it), "dp=1", listener=QUIET):
            pass
    with pytest.raises(PlanError, match=r"evaluates snapshots while workers go on, .*scheduler=\.\.\."):
        ml.Trainer(job(), "dp=2,exchange=async", listener=QUIET)

"""verify at precision=fp16-mixed: plans equal one device that scales its loss by itself, and mistakes are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.losses.loss_scale import LossScale
from meshloom.core.losses.loss_sum import Divisor
from meshloom.core.plan import Plan
from meshloom.optimizer.updater import Updater
from meshloom.program.operators.partial import CrossEntropyOfPart
from meshloom.replica import step_checks
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.team_sums import TeamSums
from meshloom.verify.findings import Report
from tests.jobs import make_job
from tests.loss_scale_jobs import BAD, BATCH, Samples, overflowing_job
from tests.verified import report_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def verified(of: Job, plan: str | Plan, **settings: Any) -> Report:
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return report_on(of, replace(plan, precision="fp16-mixed"), **{"steps": 3, "dtype": None, **settings})


@pytest.mark.parametrize(
    ("place", "part", "plan"),
    [
        (10, "boost", "dp=2,microbatches=2,zero=2"),
        (1, "of_bias", "pp=2,microbatches=2"),
        (10, "boost", "tp=2"),
        (1, "of_bias", "tp=2"),
        (1, "of_bias", "dp=2,pp=2,microbatches=2,zero=3,schedule=zb-v"),
        (3, "boost", "recompute=full"),
        (3, "boost", "dp=2,exchange=server"),
    ],
)
@pytest.mark.slow
def test_both_sides_skip_the_same_steps(place: int, part: str, plan: str):
    report = verified(overflowing_job(place, part), plan, steps=4)
    assert report.passed, [str(each) for each in report.worst()]
    assert [step.skipped for step in report.steps] == [False, True, False, False]
    assert [each["skipped"] for each in report.records()[:-1]] == [False, True, False, False]


@pytest.mark.slow
def test_when_every_step_is_skipped_nothing_is_said_of_updates():
    report = verified(overflowing_job(3, boost=1e9), "dp=2", steps=3)
    assert report.passed and [step.skipped for step in report.steps] == [False, True, False]
    endless = overflowing_job(3)
    data = Samples([{**each, "boost": torch.full((6,), 1e9)} for each in endless.data()])
    report = verified(replace(endless, data=lambda: data), "dp=2", steps=2)
    assert all(step.skipped for step in report.steps) and report.whole is None


@pytest.mark.slow
def test_a_skip_without_a_reason_is_wrong(monkeypatch: pytest.MonkeyPatch):
    found = step_checks.count_overflows

    def counted(*given: Any) -> Tensor:
        return 1 + found(*given)

    monkeypatch.setattr(step_checks, "count_overflows", counted)
    report = verified(overflowing_job(1, "of_bias", boost=1000 * BATCH / 65536), "tp=2", steps=3)
    assert not report.passed
    assert any("the gradients of the plan are finite" in each for each in report.steps[0].facts)


# --- Bugs of the scale.


def not_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LossSums.divisor

    def divisor(self: LossSums, batch: int) -> Divisor:
        assert self.scale
        return found(self, batch) / self.scale.scale

    monkeypatch.setattr(LossSums, "divisor", divisor)


def not_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank skips if its own gradients overflow."""

    def alone(gradients: Sequence[Tensor | None], team_sums: Any, replicas: Group, device: torch.device) -> Tensor:  # fmt: skip
        bad = any(not bool(each.isfinite().all()) for each in gradients if each is not None)
        return torch.tensor([float(bad)], dtype=torch.float64)

    monkeypatch.setattr(step_checks, "count_overflows", alone)


def other_stages_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TeamSums.add_up

    def add_up(self: TeamSums, axis: Any, sums: Tensor) -> None:
        found(self, axis, sums.clone() if axis == "pp" else sums)

    monkeypatch.setattr(TeamSums, "add_up", add_up)


def never_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(gradients: Any, team_sums: Any, replicas: Group, device: torch.device) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)

    monkeypatch.setattr(step_checks, "count_overflows", none)


def not_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(self: LossScale, *, overflowed: bool) -> LossScale:
        return replace(self, skipped=self.skipped + overflowed)

    monkeypatch.setattr(LossScale, "after", after)


def schedule_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Updater.update

    def update(self: Updater, *given: Any, skip: bool = False, **settings: Any) -> Tensor | None:
        norm = found(self, *given, skip=skip, **settings)
        for scheduler in self.schedulers if skip else ():
            scheduler.step()
        return norm

    monkeypatch.setattr(Updater, "update", update)


def zeros_instead_of_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Updater.update

    def update(self: Updater, gradients: Any, *given: Any, skip: bool = False, **settings: Any) -> Tensor | None:  # fmt: skip
        if skip:
            gradients = [None if each is None else torch.zeros_like(each) for each in gradients]
        return found(self, gradients, *given, **settings)

    monkeypatch.setattr(Updater, "update", update)


def two_in_a_row() -> Samples:
    """Overflows at the scale at the start in two steps, at half of it in none."""
    data = list(overflowing_job(10).data())
    data[(BAD + 1) * BATCH] = {**data[(BAD + 1) * BATCH], "boost": torch.full((6,), 9.0)}
    return Samples(data)


SCALE_BUGS = [
    (not_unscaled, "dp=2"),
    (not_unscaled, "pp=2,microbatches=2"),
    (not_agreed, "dp=2,zero=3"),
    (not_agreed, "dp=2,zero=1"),
    (other_stages_not_told, "pp=2,microbatches=2"),
    (never_looked, "dp=2,zero=2"),
    (never_looked, "tp=2"),
    (not_halved, "dp=2"),
    (schedule_goes_on, "dp=2,zero=1"),
    (zeros_instead_of_a_skip, "dp=2"),
]
QUICK_BUGS = {(not_unscaled, "dp=2"), (not_agreed, "dp=2,zero=1"), (not_halved, "dp=2")}


@pytest.mark.parametrize(
    ("plant", "plan"),
    [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1]}", marks=() if case in QUICK_BUGS else pytest.mark.slow)
        for case in SCALE_BUGS
    ],
)  # fmt: skip
def test_a_bug_of_the_scale_is_found(plant: Any, plan: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    one_owner = plant in (not_agreed, other_stages_not_told)
    of = overflowing_job(1, "of_bias") if one_owner else overflowing_job(10)
    if plant is not_halved:
        of = replace(of, data=two_in_a_row)
    # parameters that are not finite would make the next step an error
    assert _is_found(of, plan, BAD + 1 if plant is never_looked else 4)


def _is_found(job: Job, plan: str, steps: int) -> bool:
    try:
        return not verified(job, plan, steps=steps).passed
    except JobError as error:  # of schedulers of ranks that skip other steps
        return "the learning rate of group 0" in str(error)


def test_without_a_bug_two_steps_in_a_row_are_equal():
    report = verified(replace(overflowing_job(10), data=two_in_a_row), "dp=2", steps=4)
    assert report.passed and [step.skipped for step in report.steps] == [False, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["", "a loss in float16", "half the scale"])
def test_classes_that_are_divided_are_judged_as_one_device(mistake: str, monkeypatch: pytest.MonkeyPatch):
    """Their loss was computed in float16, where autocast computes it in float32: every step was skipped that one device took."""
    right, parts = CrossEntropyOfPart._rows, list[int]()  # pyright: ignore[reportPrivateUsage]

    def rows(self: CrossEntropyOfPart, logits: Tensor) -> Tensor:
        parts.append(logits.shape[1])
        return logits if mistake == "a loss in float16" else right(self, logits)

    monkeypatch.setattr(CrossEntropyOfPart, "_rows", rows)
    if mistake == "half the scale":
        divisor = LossSums.divisor
        monkeypatch.setattr(LossSums, "divisor", lambda self, batch: divisor(self, batch) / 2)
    report = verified(make_job("mlp", "adamw"), "tp=2", steps=2)
    assert set(parts) == {2, 3}
    assert report.passed == (not mistake)
    assert any(step.skipped for step in report.steps) is False

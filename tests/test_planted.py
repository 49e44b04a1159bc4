"""Each bug of the list (tests/planted/) is caught at verification's defaults; what is not named, or not placed in its module, is
listed with the reason. `python -m tests.planted` counts."""

from __future__ import annotations

import pytest
import torch

from tests.planted import BUGS
from tests.planted.bugs import Bug, at_precision, whole
from tests.planted.judging import judged
from tests.planted.misses import (
    NOT_AT_BF16_MIXED,
    NOT_NAMED,
    NOT_NAMED_AT_BF16_MIXED,
    NOT_PLACED,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
# one of several areas, cheap
COVERING = {
    "one_gradient_is_off_by_three_in_a_hundred_thousand", "a_tied_gradient_is_missing_on_one_replica", "sums_are_off_by_three_in_a_hundred_thousand",
    "the_learning_rate_is_off_by_a_thousandth", "an_average_is_off_by_a_ten_thousandth", "metrics_are_off_by_a_ten_thousandth",
    "a_norm_stays_in_training_mode", "the_second_replica_sees_an_older_weight", "a_layer_is_rounded_in_the_second_replica",
    "evaluations_freeze_a_weight", "the_critic_takes_one_turn_of_two",
    "one_gradient_under_autocast_is_off_by_a_hundredth",
}  # fmt: skip


def test_there_are_150_and_each_miss_is_one_of_them():
    names = [each.name for each in BUGS]
    assert len(set(names)) == len(names) >= 150
    assert {*NOT_NAMED, *NOT_PLACED, *NOT_AT_BF16_MIXED, *NOT_NAMED_AT_BF16_MIXED} <= set(names)
    assert {each.plant.__name__ for each in BUGS} >= COVERING


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            each,
            id=each.name,
            marks=[] if not each.number and each.plant.__name__ in COVERING else pytest.mark.slow,
        )
        for each in BUGS
    ],
)
def test_a_planted_bug_is_caught_and_named(bug: Bug, monkeypatch: pytest.MonkeyPatch):
    found = judged(bug, monkeypatch)
    assert found.caught
    assert found.named or bug.name in NOT_NAMED, found.said
    assert found.module_right or bug.module is None or bug.name in NOT_PLACED, found.said


@pytest.mark.slow
@pytest.mark.parametrize("bug", [at_precision(each, "bf16-mixed") for each in BUGS], ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_at_bf16_mixed(bug: Bug, monkeypatch: pytest.MonkeyPatch):
    found = judged(bug, monkeypatch)
    assert found.caught or bug.name in NOT_AT_BF16_MIXED
    if found.caught:
        assert found.named or bug.name in {*NOT_NAMED, *NOT_NAMED_AT_BF16_MIXED}, found.said


SETTINGS = sorted({(each.job, each.plan) for each in BUGS})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        pytest.param(*each, marks=[] if each == ("scaled-adamw", "dp=2,microbatches=2") else pytest.mark.slow)
        for each in SETTINGS
    ],
)
def test_without_a_bug_the_same_runs_pass(job: str, plan: str, dtype: torch.dtype):
    report = whole(job, plan, dtype)
    assert report.passed and not report.causes, report.causes

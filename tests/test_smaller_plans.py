"""The smallest plan that differs: which settings of a plan a difference takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshloom.cli.main import main
from meshloom.core.plan import Plan
from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.verify.smaller_plans import plans_below, smallest_plan

FILE = str(Path(__file__).with_name("job_file.py"))
LARGE = Plan.parse("dp=4,pp=2,tp=2,microbatches=4,zero=2,keyed_draws=true,precision=bf16-mixed")
NEEDS = {
    "dp": lambda plan: plan.dp > 1,
    "pp": lambda plan: plan.pp > 1,
    "tp": lambda plan: plan.tp > 1,
    "microbatches": lambda plan: plan.microbatches > 1,
    "zero": lambda plan: plan.zero > 0,
    "keyed_draws": lambda plan: plan.keyed_draws,
    "precision": lambda plan: plan.precision != "float32",
}


@given(needed=st.sets(st.sampled_from(sorted(NEEDS))), fails=st.sets(st.sampled_from(sorted(NEEDS))))
@pytest.mark.long
def test_what_is_left_is_what_the_difference_takes(needed: Collection[str], fails: Collection[str]):
    """Plans that lack a setting in `fails`, and are otherwise wrong, end with an error."""

    def differs(plan: Plan) -> bool | None:
        if not all(NEEDS[name](plan) for name in needed):
            return False
        return True if all(NEEDS[name](plan) for name in fails) else None

    found = smallest_plan(LARGE, differs)
    plan = Plan.parse(found.plan)
    assert {name for name in NEEDS if NEEDS[name](plan)} == {*needed, *fails}
    assert found.plan not in {*found.equal, *found.failed}
    assert {*found.equal, *found.failed} == {str(each) for each in plans_below(plan)}
    assert bool(found.failed) == bool({*fails} - {*needed})
    assert found.runs <= len(NEEDS) ** 2


def test_numbers_are_lowered_before_they_are_kept():
    found = smallest_plan(
        Plan.parse("dp=4,microbatches=8,zero=3"), lambda plan: plan.zero >= 2 and plan.dp >= 2
    )
    assert found.plan == "dp=2,zero=2"
    assert "dp=2,zero=2; dp=2, dp=2,zero=1 and dp=1,zero=2 are equal" in found.sentence


def test_where_one_device_differs_no_setting_is_the_reason():
    assert "no setting of the plan" in smallest_plan(LARGE, lambda plan: True).sentence
    assert "no setting of the plan" in smallest_plan(Plan(), lambda plan: False).sentence


def test_settings_that_others_need_stay():
    below = [str(each) for each in plans_below(Plan.parse("dp=2,exchange=server,servers=2"))]
    assert below == ["dp=2,exchange=server"]
    below = [str(each) for each in plans_below(Plan.parse("tp=2,tp_placements=head:column"))]
    assert below == ["dp=1,tp=2"]


@pytest.fixture
def noise_in_later_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero=2, chunks after the first add a gradient that is noise."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    ready, generator = ScatteredBuckets._ready, torch.Generator().manual_seed(0)

    def noisy(self: Any, place: Any, parameter: torch.nn.Parameter) -> None:
        if self._chunk and parameter.grad is not None:
            parameter.grad += torch.randn(parameter.shape, generator=generator) * parameter.grad.norm()
        ready(self, place, parameter)

    monkeypatch.setattr(ScatteredBuckets, "_ready", noisy)


@pytest.mark.usefixtures("noise_in_later_chunks")
@pytest.mark.parametrize("flags", [[], ["--bisect"], ["--quick"]])
@pytest.mark.slow
def test_settings_that_make_a_plan_differ_are_found(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    plan = "dp=2,microbatches=2,zero=2,keyed_draws=true"
    words = ["verify", FILE, "--plan", plan, "--devices", "simulated", "--report", str(page)]
    assert main([*words, *flags]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "the smallest plan that differs: dp=2,microbatches=2,zero=2; dp=2,zero=2, dp=2,microbatches=2,"
        in said
    )
    assert "the smallest plan that differs" in page.read_text()


@pytest.mark.usefixtures("noise_in_later_chunks")
@pytest.mark.slow
def test_json_has_the_smallest_plan(capsys: pytest.CaptureFixture[str]):
    words = ["verify", FILE, "--plan", "dp=2,microbatches=2,zero=2", "--devices", "simulated", "--json", "-"]
    assert main([*words, "--quick"]) == 1
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert end["smallest_plan"]["plan"] == "dp=2,microbatches=2,zero=2"
    assert "dp=2,microbatches=2" in end["smallest_plan"]["equal"]


@pytest.mark.long
def test_nothing_is_looked_for_where_a_plan_is_equal(capsys: pytest.CaptureFixture[str]):
    words = ["verify", FILE, "--plan", "dp=2", "--devices", "simulated", "--quick", "--bisect"]
    assert main(words) == 0
    assert "smallest" not in capsys.readouterr().out


def test_processes_do_not_bisect(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", FILE, "--plan", "dp=2", "--devices", "cpu", "--bisect"]) == 2
    assert "Use --devices simulated" in capsys.readouterr().err

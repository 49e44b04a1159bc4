"""Plans that are tried: what is tried, what becomes of the advice, and what a step of ranks that sleep
takes."""

from __future__ import annotations

import time
from dataclasses import replace
from types import MappingProxyType

import pytest
from test_advise import option
from torch import Tensor, nn

from meshloom.measure.trials import try_plans
from meshloom.planner.advise import Advice, finalists, tried
from meshloom.planner.memory.memory import Memory
from meshloom.planner.pricing import Option
from meshloom.report.advice import advice_records
from tests.jobs import class_loss, make_job

SECONDS_PER_SAMPLE = 0.01


def sleepy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Takes as long as its samples say, which no rehearsal sees: its clock is of what is computed."""
    time.sleep(SECONDS_PER_SAMPLE * len(batch["x"]))
    return class_loss(model, batch)


def failing_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The ninth batch is too much for it."""
    failing_loss.calls += 1  # type: ignore[attr-defined]
    if failing_loss.calls == 9:  # type: ignore[attr-defined]
        raise ZeroDivisionError("the ninth")
    return class_loss(model, batch)


failing_loss.calls = 0  # type: ignore[attr-defined]
sleepy = replace(make_job("mlp", "sgd", batch_size=8), loss=sleepy_loss)
failing = replace(make_job("mlp", "sgd", batch_size=8), loss=failing_loss)


def advice(*options: Option) -> Advice:
    """Before anything was tried; nothing is recommended yet."""
    memory = Memory(
        parameters=100,
        buffers=0,
        gradients=100,
        optimizer=0,
        batch=0,
        kept=0,
        temporaries=0,
        peaks={"forward": 200},
    )
    return Advice(
        options=options, refused=MappingProxyType({}), one_device=memory, one_device_limit=1000, recommended=None, reason="", work=None,
        speedups=(), exchange="",
    )  # fmt: skip


def test_the_recommended_one_and_the_fastest_that_fit_are_tried():
    options = (
        option("dp=1", 1.02),
        option("tp=2", 1.0),
        option("dp=2", 1.1),
        option("dp=4", 0.5, memory_bytes=2000),
    )
    found = tried(advice(*options), {})
    # the simplest of those that are about as fast
    assert found.recommended and str(found.recommended.plan) == "dp=1"
    assert [str(each.plan) for each in finalists(found, 2)] == ["dp=1", "dp=1,tp=2"]
    assert [str(each.plan) for each in finalists(found, 9)] == ["dp=1", "dp=1,tp=2", "dp=2"]


def test_what_was_measured_decides_and_what_was_not_tried_does_not():
    options = option("dp=1", 1.0), option("dp=2", 1.1), option("dp=3", 0.9)
    found = tried(advice(*options), {"dp=1": 2.0, "dp=2": 1.0})
    assert found.recommended and str(found.recommended.plan) == "dp=2"
    assert "Take dp=2, 2.00 times as fast as one rank" in found.reason
    # those that were tried first
    assert [str(each.plan) for each in found.options] == ["dp=2", "dp=1", "dp=3"]
    assert "2.00 times the step of dp=2" in found.options[1].why
    records = {
        each["plan"]: each["measured_seconds"] for each in advice_records(found) if each["event"] == "plan"
    }
    assert records == {"dp=1": 2.0, "dp=2": 1.0, "dp=3": None}


def test_a_plan_that_fails_is_no_option_any_more():
    found = tried(advice(option("dp=1", 1.0), option("dp=2", 0.5)), {"dp=1": 1.0, "dp=2": None})
    assert [str(each.plan) for each in found.options] == ["dp=1"]
    assert dict(found.refused) == {"dp=2": "it failed when it was tried"}
    assert found.recommended and str(found.recommended.plan) == "dp=1"


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_of_ranks_that_sleep_takes_their_sleep():
    said: list[str] = []
    options = [option("dp=1", 1.0), option("dp=2", 1.0)]
    found = try_plans(options, f"{__file__}:sleepy", "auto", said.append)
    assert not isinstance(found, int)
    one, two = found["dp=1"], found["dp=2"]
    assert one is not None and two is not None
    assert one >= 8 * SECONDS_PER_SAMPLE and two >= 4 * SECONDS_PER_SAMPLE
    assert two < one
    assert said == ["trial 1 of 4: dp=1", "trial 2 of 4: dp=2", "trial 3 of 4: dp=2", "trial 4 of 4: dp=1"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_trial_that_fails_says_why(capfd: pytest.CaptureFixture[str]):
    assert try_plans([option("dp=2", 1.0)], f"{__file__}:failing", "auto", lambda text: None) == {
        "dp=2": None
    }
    assert "ZeroDivisionError" in capfd.readouterr().err

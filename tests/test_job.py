"""The job: what is not a job says so when it is made, with what to write instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job

GOOD: dict[str, Any] = {
    "model": lambda: nn.Linear(1, 1),
    "loss": lambda model, batch: model(batch).mean(),
    "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
    "data": lambda: torch.zeros(8, 1),
    "batch_size": 4,
    "steps": 2,
}


def test_a_job_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Job(**GOOD).steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "data", "collate", "scheduler"])
def test_what_is_called_must_be_a_function(name: str):
    with pytest.raises(
        JobError, match=rf"^Job\({name}=\.\.\.\) must be a function, like {name}=.*, not int\.$"
    ):
        Job(**{**GOOD, name: 3})


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("loss", lambda output, target, model: model, r"called with \(model, batch\), and this function takes \(output, target, model\)\."),
        ("optimizer", lambda: None, r"called with \(named\), and this function takes \(\)\."),
        ("data", lambda split: split, r"called with \(\), and this function takes \(split\)\."),
        ("collate", lambda x, y: (x, y), r"called with \(samples\), and this function takes \(x, y\)\."),
        ("scheduler", lambda: None, r"called with \(optimizer\), and this function takes \(\)\. Write it like scheduler="),
    ],
)  # fmt: skip
def test_a_function_that_takes_something_else_is_said(name: str, function: object, words: str):
    """They ended in tracebacks of ours, since no line of the user's was reached."""
    with pytest.raises(JobError, match=rf"^Job\({name}=\.\.\.\) is {words}"):
        Job(**{**GOOD, name: function})


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("batch_size", 1),
        ("steps", 1),
        ("seed", 0),
        ("num_workers", 0),
        ("keep_checkpoints", 1),
        ("tokens_per_sample", 1),
        ("checkpoint_every", 1),
    ],
)
@pytest.mark.parametrize("wrong", ["too small", 2.0, True, "4"])
@pytest.mark.every
def test_counts_are_whole_numbers(name: str, least: int, wrong: object):
    value = least - 1 if wrong == "too small" else wrong
    with pytest.raises(JobError) as caught:
        Job(**{**GOOD, name: value})
    assert str(caught.value) == f"Job({name}={value!r}) must be a whole number, {least} or more."


@pytest.mark.parametrize("name", ["batch_size", "steps", "model", "loss", "optimizer", "data"])
def test_nothing_needed_may_be_none(name: str):
    with pytest.raises(JobError, match=rf"^Job\({name}="):
        Job(**{**GOOD, name: None})


@pytest.mark.parametrize(
    "name", ["tokens_per_sample", "checkpoint_every", "collate", "scheduler", "clip_grad_norm", "evaluate"]
)
def test_the_rest_may_be_none(name: str):
    assert getattr(Job(**{**GOOD, name: None}), name) is None


@pytest.mark.parametrize("clip", [0, -1.0, True, "1", float("nan")])
def test_the_largest_norm_is_above_zero(clip: object):
    with pytest.raises(
        JobError, match=r"^Job\(clip_grad_norm=.*\) must be a number above 0, or None for no clipping\.$"
    ):
        Job(**{**GOOD, "clip_grad_norm": clip})

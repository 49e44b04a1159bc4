"""Each factor is told where it gives the plan's numbers, and nothing where none does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.factors import Wrong, of_gradients, of_norm, of_updates
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import ChunkGradients
from tests.held import hold_against, step_of
from tests.jobs import make_job

PLAN = Plan.parse("dp=3,tp=5,microbatches=2")
WEIGHTS = [1.0, 2.0, 3.0, 4.0, 0.0, 7.0]  # of chunks; the whole batch has 17
NAMES = ("first.weight", "first.bias")
GENERATOR = torch.Generator().manual_seed(7)


def drawn() -> dict[str, Tensor]:
    return {name: torch.randn(11, generator=GENERATOR, dtype=torch.float64) for name in NAMES}


CHUNKS = [
    ChunkGradients(chunks=[index], weight=weight, gradients=drawn()) for index, weight in enumerate(WEIGHTS)
]
BEFORE, ALIKE = drawn(), drawn()
TOTAL = sum(WEIGHTS)


def added(name: str, *chunks: int) -> Tensor:
    """The sum of what these chunks have."""
    return sum((CHUNKS[chunk].gradients[name] for chunk in chunks), torch.zeros(11, dtype=torch.float64))


def right(name: str) -> Tensor:
    return added(name, *range(6)) / TOTAL


def told(gradient: Callable[[str], Tensor]) -> str:
    wrong = [Wrong(name=name, ours=gradient(name), right=right(name), tolerance=1e-9) for name in NAMES]
    return of_gradients(wrong, PLAN, CHUNKS, BEFORE, {"chunks that draw as the first one does": ALIKE})


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (lambda name: 3 * right(name), "dp = 3 times one device's"),
        (lambda name: 2 * right(name), "microbatches = 2 times one device's"),
        (lambda name: 5 * right(name), "tp = 5 times one device's"),
        (lambda name: right(name) / 3, "one device's divided by dp = 3"),
        (lambda name: TOTAL * right(name), "the weight of the batch = 17 times one device's"),
        (lambda name: right(name) - added(name, 3) / TOTAL, "those without chunk 3"),
        (lambda name: added(name, 0, 1, 2, 3, 4) / 10, "those of all chunks but 5"),
        (lambda name: right(name) + added(name, 1) / TOTAL, "those with chunk 1 twice"),
        (lambda name: added(name, 2, 3) / 7, "those of replica 1 alone: they are not reduced"),
        (lambda name: BEFORE[name], "those of the step before"),
        (lambda name: right(name) + BEFORE[name], "one device's and those of the step before"),
        (lambda name: ALIKE[name], "random draws, such as dropout masks, are equal"),
    ],
)
def test_a_factor_that_gives_the_gradients_is_told(gradient: Callable[[str], Tensor], words: str):
    assert told(gradient).startswith("The gradients of first.weight, first.bias are ") and words in told(
        gradient
    )
    assert told(lambda name: gradient(name) * (1 + 1e-7)) == ""  # of what it leaves more than the tolerance


def test_a_factor_of_one_of_the_gradients_is_not_told():
    assert told(lambda name: (3 if name == NAMES[0] else 2.9) * right(name)) == ""
    assert told(lambda name: right(name) * math.nan) == ""


def updates(update: Callable[[Tensor, Tensor], Tensor], clipped_by: float = 1.0) -> str:
    wrong: list[Wrong] = []
    for name, before in BEFORE.items():
        wrong.append(
            Wrong(
                name=name, ours=update(right(name), before), right=right(name), tolerance=1e-9, before=before
            )
        )
    return of_updates(wrong, clipped_by)


def test_a_factor_that_gives_the_updates_is_told():
    assert "are 1.5 times one device's: another rate" in updates(lambda step, before: 1.5 * step)
    assert "are 4 times one device's: gradients are not clipped" in updates(
        lambda step, before: 4 * step, clipped_by=4.0
    )
    assert "and -0.01 times the parameters: another decay" in updates(
        lambda step, before: step - 0.01 * before
    )
    assert updates(lambda step, before: step + before.roll(1)) == ""


def test_a_norm_over_a_part_of_the_model_is_told():
    norms = {"first.weight": 3.0, "first.bias": 4.0, "middle.weight": 12.0, "last.weight": 84.0}

    def of(square: float, dp: int = 1) -> str:
        return of_norm(math.sqrt(square), 85.0, 1e-6, norms, dp)

    assert of(85**2 - 9).endswith("is that without first.weight.")
    assert of(85**2 + 16).endswith("is that with first.bias twice.")
    assert of(85**2 - 25).endswith("is that without first.")
    assert of(25).endswith("is that of what is before middle alone.")
    assert of(2 * 85**2, dp=2).endswith("is that of the gradients of dp = 2 replicas.")
    assert of(100.0) == ""


@pytest.mark.parametrize(
    ("times", "words"),
    [(2.0, "are dp = microbatches = 2 times one device's"), (1.9, "")],
)
def test_it_is_told_of_a_step(times: float, words: str):
    plan = Plan.parse("dp=2,microbatches=2")
    ours = step_of(Reference(make_job("mlp", "sgd"), plan))
    wrong = {name: None if each is None else times * each for name, each in ours.gradients.items()}
    found = hold_against(Reference(make_job("mlp", "sgd"), plan), [replace(ours, gradients=wrong)])
    assert not found.steps[0].passed
    assert words in found.explained and bool(found.explained) == bool(words)

"""Plans on simulated devices equal one device: every two settings; every three in the slow tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.covering import Case
from tests.matrix import SETTINGS, case_name, covering_cases, run_cases, thorough_cases


def test_the_covering_cases_cover_all_pairs() -> None:
    pairs = {
        (a, str(x), b, str(y))
        for a in SETTINGS
        for x in SETTINGS[a]
        for b in SETTINGS
        if a < b
        for y in SETTINGS[b]
    }
    met = {
        (a, str(case[a]), b, str(case[b]))
        for case in covering_cases()
        for a in SETTINGS
        for b in SETTINGS
        if a < b
    }
    assert met == pairs
    assert len(covering_cases()) < 60


def test_the_thorough_cases_cover_all_triples() -> None:
    names = [(a, b, c) for a in SETTINGS for b in SETTINGS for c in SETTINGS if a < b < c]
    triples = {
        (three, values)
        for three in names
        for values in product(*(map(str, SETTINGS[name]) for name in three))
    }
    assert {
        (three, tuple(str(case[name]) for name in three)) for case in thorough_cases() for three in names
    } == triples
    assert len(thorough_cases()) < 220  # of 1,800


def covering_params() -> Iterator[Any]:
    """The covering cases; those in which every value occurs that the ones before have met already are
    `long`."""
    met: set[tuple[str, str]] = set()
    for case in covering_cases():
        values = {(name, str(value)) for name, value in case.items()}
        yield pytest.param(case, id=case_name(case), marks=pytest.mark.long if values <= met else ())
        met |= values


@pytest.mark.long
@pytest.mark.covering(
    "dp4-microbatches5-zero1-even-mlp",
    "dp8-microbatches5-zero1-empty-branch",
    "dp8-microbatches1-zero1-even-cnn",
    "dp8-microbatches2-zero1-empty-mlp",
    "dp1-microbatches5-zero1-uneven-gpt",
    "dp2-microbatches1-zero0-empty-gpt",
    "dp2-microbatches5-zero1-empty-branch",
    "dp2-microbatches2-zero1-empty-unused",
    "dp3-microbatches1-zero0-uneven-unused",
    "dp3-microbatches2-zero0-uneven-cnn",
    "dp4-microbatches1-zero1-even-unused",
    "dp4-microbatches2-zero0-empty",
)
@pytest.mark.parametrize("case", list(covering_params()))
def test_a_plan_equals_one_device(case: Case) -> None:
    assert run_cases([case], "simulated") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", thorough_cases(), ids=case_name)
def test_every_three_settings_together_equal_one_device(case: Case) -> None:
    assert run_cases([case], "simulated") == []

"""Ranks that talk through shared memory get what one process computes, bit for bit, whatever they start and however they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collective_programs import programs
from collective_runs import run_program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warm_ranks import WarmRanks

pytestmark = pytest.mark.processes


@pytest.fixture(params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[WarmRanks]:
    with WarmRanks(request.param) as ranks:
        yield ranks


def check_programs(world: WarmRanks, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        problems = world.run(run_program, data.draw(programs(world.size)))
        assert not any(problems), "\n".join(problem for rank in problems for problem in rank)

    check()


def test_programs_equal_one_process(world: WarmRanks) -> None:
    check_programs(world, 60)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_programs_equal_one_process(world: WarmRanks) -> None:
    check_programs(world, 1500)

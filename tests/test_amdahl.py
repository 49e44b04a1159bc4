"""Amdahl's law against workers that are followed unit by unit."""

from __future__ import annotations

import pytest

from meshloom.core.errors import PlanError
from meshloom.planner.amdahl import AmdahlWork, bound, with_communication


def followed(serial_units: int, parallel_units: int, num_ranks: int, talking_units: int) -> int:
    """Ticks until all is done: one rank does the serial units, then every rank takes a unit of what is left
    in each tick, then they talk."""
    ticks = serial_units
    left = parallel_units
    while left > 0:
        left -= num_ranks
        ticks += 1
    return ticks + talking_units


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("serial", "parallel"), [(1, 12), (12, 24), (0, 36), (5, 0)])
@pytest.mark.parametrize("talking", [0, 7])
@pytest.mark.every
def test_the_formula_is_what_following_every_unit_says(
    num_ranks: int, serial: int, parallel: int, talking: int
):
    # parallel is divided evenly by every number of ranks
    work = AmdahlWork(serial_seconds=serial, parallel_seconds=parallel)
    expected = followed(serial, parallel, 1, 0) / followed(serial, parallel, num_ranks, talking)
    assert with_communication(work, num_ranks, talking) == pytest.approx(expected, rel=1e-12)
    if not talking:
        assert bound(work, num_ranks) == pytest.approx(expected, rel=1e-12)


def test_no_number_of_ranks_is_faster_than_the_serial_part():
    work = AmdahlWork(serial_seconds=1.0, parallel_seconds=9.0)
    speeds = [bound(work, num_ranks) for num_ranks in (1, 2, 8, 1000)]
    assert speeds == sorted(speeds) and speeds[0] == 1.0 and speeds[-1] < 10.0


@pytest.mark.parametrize(("serial", "parallel"), [(0.0, 0.0), (-1.0, 2.0)])
def test_no_work_is_refused(serial: float, parallel: float):
    with pytest.raises(PlanError, match="serial and .* parallel work is not possible"):
        AmdahlWork(serial_seconds=serial, parallel_seconds=parallel)

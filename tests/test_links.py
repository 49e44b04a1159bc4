"""Seconds of a collective come from the most similar measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshloom.core.errors import MachineError
from meshloom.machine.links import COLLECTIVES, Collective, Link, fit_link, seconds_of
from meshloom.machine.machine import collective_seconds, example_machine

MACHINE = example_machine()


def link(**values: Any) -> Link:
    return Link(
        **{
            "collective": "all_reduce",
            "ranks": 2,
            "latency_seconds": 1.0,
            "bytes_per_second": 1e9,
            "residual": 0.0,
            **values,
        }
    )


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_takes_what_was_measured_and_more_with_more_ranks(collective: Collective):
    assert collective_seconds(MACHINE, collective, 1e6, 2) == pytest.approx(2e-3)
    seconds = [collective_seconds(MACHINE, collective, 1e6, ranks) for ranks in (2, 3, 4, 8)]
    assert seconds == sorted(seconds)
    assert collective_seconds(MACHINE, collective, 1e6, 1) == 0.0


def test_other_numbers_of_ranks_follow_the_ring():
    """Simulated step by step: each of 2(N-1) steps takes the latency of one step and a slice's bytes."""
    # the example's: two ranks, two steps, half of the bytes in each
    step_latency, bytes_per_second = 1e-3 / 2, 1e9
    for ranks in (2, 3, 5):
        naive = sum(step_latency + (3e6 / ranks) / bytes_per_second for _ in range(2 * (ranks - 1)))
        assert collective_seconds(MACHINE, "all_reduce", 3e6, ranks) == pytest.approx(naive)


def test_the_nearest_measured_number_of_ranks_is_used():
    links = tuple(
        Link(
            collective="all_reduce",
            ranks=ranks,
            latency_seconds=ranks * 1.0,
            bytes_per_second=1e9,
            residual=0.0,
        )
        for ranks in (2, 8)
    )
    machine = replace(MACHINE, links=links)
    assert collective_seconds(machine, "all_reduce", 0, 8) == pytest.approx(8.0)
    assert collective_seconds(machine, "all_reduce", 0, 7) == pytest.approx(8.0 * 6 / 7)
    assert collective_seconds(machine, "all_reduce", 0, 2) == pytest.approx(2.0)


def test_a_fit_finds_the_line_it_was_given_and_says_how_far_it_is_off():
    line = [(num_bytes, 2e-4 + num_bytes / 3e9) for num_bytes in (4096, 65536, 2**20, 2**23)]
    link = fit_link("all_gather", 4, line)
    assert link.latency_seconds == pytest.approx(2e-4, rel=1e-5)
    assert link.bytes_per_second == pytest.approx(3e9, rel=1e-5)
    assert link.residual < 1e-5
    bent = fit_link("all_gather", 4, [*line[:-1], (2**23, 2 * line[-1][1])])
    assert bent.residual > 0.1


@pytest.mark.parametrize(
    "measured",
    [[(1e3, 1e-3), (1e6, 0.9e-3)], [(1e3, 1e-6), (1e6, 2e-3), (1e7, 1e-2)], [(1e3, 1e-3), (1e6, 1e-3)]],
)
def test_a_fit_of_noise_has_a_latency_and_a_rate(measured: list[tuple[float, float]]):
    link = fit_link("broadcast", 2, measured)
    assert link.latency_seconds >= 0
    assert link.bytes_per_second > 0


def test_between_measured_sizes_lies_a_line_and_beyond_them_the_rate():
    measured = link(latency_seconds=5.0, bytes_per_second=10.0, points=((100.0, 1.0), (300.0, 5.0)))
    assert [measured.seconds(num_bytes) for num_bytes in (0, 100, 150, 300, 320)] == [1.0, 1.0, 2.0, 5.0, 7.0]


def test_the_place_counts_before_the_number_of_ranks_and_that_before_how_many_there_are():
    links = [
        link(ranks=2, latency_seconds=1.0),
        link(ranks=2, among=4, latency_seconds=2.0),
        link(ranks=4, place="between", latency_seconds=3.0),
        link(ranks=2, in_place=True, latency_seconds=4.0),
    ]
    assert seconds_of(links, "all_reduce", 0, 2, among=2, place="inside") == 1.0
    assert seconds_of(links, "all_reduce", 0, 2, among=4, place="inside") == 2.0
    assert seconds_of(links, "all_reduce", 0, 4, among=4, place="between") == 3.0
    assert seconds_of(links, "all_reduce", 0, 2, among=2, in_place=True) == 4.0
    assert seconds_of(links, "send", 0, 2) is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"place": "beside"}, "'beside' hosts is not known"),
        ({"ranks": 1}, "is no link"),
        ({"bytes_per_second": 0.0}, "no latency and no rate"),
        ({"points": ((2.0, 1.0), (1.0, 1.0))}, "ascending bytes"),
    ],
)
def test_a_link_that_cannot_be_is_refused(values: dict[str, Any], sentence: str):
    with pytest.raises(MachineError, match=sentence):
        link(**values)

"""Rates: what collectives take as a ring, as defaults and as measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshloom.cluster import collective_seconds, example_machine
from meshloom.graph.cost import Cost
from meshloom.graph.rates import COLLECTIVES, Rates, default_rates, rates_of


def test_measured_collectives_take_what_was_measured():
    machine = example_machine()
    for num_ranks in (2, 4):
        rates = rates_of(machine, num_ranks)
        for collective in COLLECTIVES:
            for num_bytes in (0.0, 1e5, 1e9):
                expected = collective_seconds(machine, collective, num_bytes, num_ranks)
                assert rates.collective_seconds(collective, num_bytes, num_ranks) == pytest.approx(expected, rel=1e-9)  # a line through two points
    assert rates_of(machine, 2).flops_per_second == machine.operation("matmul", "float32").rate


def test_a_machine_without_links_keeps_the_defaults():
    rates = rates_of(replace(example_machine(), links=()), 2)
    for collective in COLLECTIVES:
        assert rates.collective_seconds(collective, 1e6, 2) == default_rates("cpu").collective_seconds(collective, 1e6, 2)


def test_a_ring_gathers_and_scatters_in_the_time_of_an_all_reduce():
    """2(N-1) messages of S/N: half of them scatter, half gather (Patarasuk & Yuan, 2009)."""
    rates = Rates(start_seconds=0.0)
    for n in (2, 3, 8):
        halves = rates.collective_seconds("reduce_scatter", 1e6, n) + rates.collective_seconds("all_gather", 1e6 / n, n)
        assert rates.collective_seconds("all_reduce", 1e6, n) == pytest.approx(halves, rel=1e-12)


def test_an_operator_takes_as_long_as_the_slower_of_its_work_and_its_bytes():
    rates = Rates(flops_per_second=10.0, bytes_per_second=1.0)
    assert rates.node_seconds(Cost(flops=100, read_bytes=1, backward_read_bytes=2, backward_written_bytes=3)) == 15.0

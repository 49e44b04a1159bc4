"""Rates: what collectives take as a ring, as defaults and as measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from choice_jobs import GPT, job_of, next_token, tokens

from meshloom.core.errors import MachineError
from meshloom.core.plan import Plan
from meshloom.machine.machine import Link, collective_seconds, example_machine, machine_file, save
from meshloom.planner.divided import divided
from meshloom.planner.readings import Readings
from meshloom.program.cost.cost import Cost
from meshloom.program.cost.rates import COLLECTIVES, Rates, default_rates, rates_here, rates_of
from meshloom.tensor_parallel.explain import DivisionAccount, text_of


def test_measured_collectives_take_what_was_measured():
    machine = example_machine()
    for num_ranks in (2, 4):
        rates = rates_of(machine, num_ranks)
        for collective in COLLECTIVES:
            for num_bytes in (0.0, 1e5, 1e9):
                expected = collective_seconds(machine, collective, num_bytes, num_ranks)
                # a line through two points
                assert rates.collective_seconds(collective, num_bytes, num_ranks) == pytest.approx(
                    expected, rel=1e-9
                )
    assert rates_of(machine, 2).flops_per_second == machine.operation("matmul", "float32").rate
    alone = rates_of(machine, 1)
    assert {alone.collective_seconds(each, 1e9, 1) for each in COLLECTIVES} == {0.0}


def test_a_machine_without_links_keeps_the_defaults():
    rates = rates_of(replace(example_machine(), links=()), 2)
    for collective in COLLECTIVES:
        assert rates.collective_seconds(collective, 1e6, 2) == default_rates("cpu").collective_seconds(
            collective, 1e6, 2
        )


def test_a_ring_gathers_and_scatters_in_the_time_of_an_all_reduce():
    """2(N-1) messages of S/N: half of them scatter, half gather (Patarasuk & Yuan, 2009)."""
    rates = Rates(start_seconds=0.0)
    for n in (2, 3, 8):
        halves = rates.collective_seconds("reduce_scatter", 1e6, n) + rates.collective_seconds(
            "all_gather", 1e6 / n, n
        )
        assert rates.collective_seconds("all_reduce", 1e6, n) == pytest.approx(halves, rel=1e-12)


def test_an_operator_takes_as_long_as_the_slower_of_its_work_and_its_bytes():
    rates = Rates(flops_per_second=10.0, bytes_per_second=1.0)
    assert (
        rates.node_seconds(Cost(flops=100, read_bytes=1, backward_read_bytes=2, backward_written_bytes=3))
        == 15.0
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory in which nothing was measured yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_rates_are_this_machines_where_they_were_measured(home: Path):
    assert rates_here("cpu", 2) == default_rates("cpu")
    save(example_machine(), machine_file("cpu"))
    assert home in machine_file("cpu").parents
    assert rates_here("cpu", 2) == rates_of(example_machine(), 2)
    assert rates_here("cuda", 2) == default_rates("cuda")  # what a CPU does says nothing of a GPU
    machine_file("cpu").write_text("{")
    with pytest.raises(MachineError, match="is no JSON"):
        rates_here("cpu", 2)


def calls(account: DivisionAccount) -> int:
    """Collectives in a chunk."""
    return sum(count * row.times for row in account.rows for _, (count, _) in row.sent)


@pytest.mark.usefixtures("silent_export")
@pytest.mark.slow
def test_an_account_says_whose_rates_it_was_chosen_with(home: Path):
    """And they count: where each collective takes seconds, there are fewer of them."""
    batch = tokens(3)
    job = replace(
        job_of(lambda: GPT(blocks=2), next_token),
        data=lambda: [{"x": row} for row in batch["x"]],
        batch_size=3,
    )
    account = divided(Readings(job), Plan(tp=2)).account
    assert "Rates: default rates; meshloom calibrate measures this machine's." in text_of(account)
    slow = [
        Link(collective=each, ranks=2, latency_seconds=1.0, bytes_per_second=1e9, residual=0.0)
        for each in COLLECTIVES
    ]
    save(replace(example_machine(), links=tuple(slow)), machine_file("cpu"))
    measured = divided(Readings(job), Plan(tp=2)).account
    assert "Rates: measured on example at 19" in text_of(measured)  # 1970, or the evening before it
    assert calls(measured) < calls(account)

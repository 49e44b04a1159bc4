"""Ranks that talk through shared memory get what one process computes, bit for bit, whatever they start and
however they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from collective_programs import Program, programs
from collective_runs import run_program, run_programs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from warm_ranks import WarmRank, WarmRanks

pytestmark = pytest.mark.processes


@pytest.fixture(params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[WarmRanks]:
    with WarmRanks(request.param) as ranks:
        yield ranks


@pytest.fixture
def four_ranks() -> Iterator[WarmRanks]:
    with WarmRanks(4) as ranks:
        yield ranks


def check_programs(world: WarmRanks, examples: int, tiny: bool) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        assert_right(world.run(run_program, data.draw(programs(world.size)), tiny))

    check()


def assert_right(problems: list[list[str]]) -> None:
    assert not any(problems), "\n".join(problem for rank in problems for problem in rank)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.slow
def test_programs_equal_one_process(world: WarmRanks, tiny: bool) -> None:
    check_programs(world, 30, tiny)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tiny", [False, True])
def test_many_programs_equal_one_process(world: WarmRanks, tiny: bool) -> None:
    check_programs(world, 300, tiny)


def drawn(size: int, count: int) -> list[Program]:
    """The same programs each time."""
    found: list[Program] = []

    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
        derandomize=True,
    )
    @given(programs(size))
    def keep(program: Program) -> None:
        found.append(program)

    keep()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tiny", [False, True])
def test_four_ranks_never_stop_between_thousands_of_calls(four_ranks: WarmRanks, tiny: bool) -> None:
    many = drawn(4, 800)
    assert sum(len(calls) for program in many for calls in program.rounds) > 3000
    assert_right(four_ranks.run(run_programs, many, tiny, timeout_seconds=600.0))


@pytest.mark.slow
def test_four_ranks_never_stop_between_calls(four_ranks: WarmRanks) -> None:
    assert_right(four_ranks.run(run_programs, drawn(4, 60), timeout_seconds=60.0))


def _large(warm: WarmRank) -> list[bool]:
    """40 MB at a time, messages both ways among them: more than is ever handed in at once."""
    group = warm.open()
    count, n, rank = 10_000_001, group.size, group.rank
    ramp = torch.arange(count, dtype=torch.int32)
    right: list[bool] = []
    tensor = ramp + rank
    group.all_reduce(tensor).wait()
    right.append(torch.equal(tensor, ramp * n + sum(range(n))))
    received = torch.empty_like(ramp)
    works = [group.send(ramp * rank, (rank + 1) % n), group.recv(received, (rank - 1) % n)]
    for work in works:
        work.wait()
    right.append(torch.equal(received, ramp * ((rank - 1) % n)))
    whole = torch.empty(n * count, dtype=torch.int32)
    group.all_gather(whole, ramp + rank).wait()
    right.append(torch.equal(whole.view(n, -1), ramp + torch.arange(n, dtype=torch.int32)[:, None]))
    output = torch.empty_like(ramp)
    group.reduce_scatter(output, whole).wait()
    right.append(torch.equal(output, (ramp + rank) * n))
    sizes = [count if other == (rank + 1) % n else 0 for other in range(n)]
    received = torch.empty_like(ramp)
    group.all_to_all(
        received, ramp - rank, [count if other == (rank - 1) % n else 0 for other in range(n)], sizes
    ).wait()
    right.append(torch.equal(received, ramp - (rank - 1) % n))
    return right


@pytest.mark.slow
def test_tensors_larger_than_what_is_under_way_at_a_time(world: WarmRanks) -> None:
    assert world.run(_large) == [[True] * 5] * world.size


def _extremes(warm: WarmRank) -> list[list[float]]:
    group = warm.open()
    nan, infinity = float("nan"), float("inf")
    rows = [[1.0, nan, infinity, -0.5, 65000.0], [nan, 2.0, -infinity, -0.5, 65000.0]]
    found: list[list[float]] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op in ("min", "max", "sum"):
            tensor = torch.tensor(rows[group.rank], dtype=dtype)
            group.all_reduce(tensor, op).wait()
            wanted = {"min": torch.minimum, "max": torch.maximum, "sum": torch.add}[op](
                *(torch.tensor(row, dtype=dtype) for row in rows)
            )
            torch.testing.assert_close(tensor, wanted, rtol=0.0, atol=0.0, equal_nan=True)
            found.append([dtype.itemsize, len(wanted)])
    return found


def test_nan_infinity_and_overflow_are_as_in_torch() -> None:
    with WarmRanks(2) as ranks:
        assert len(ranks.run(_extremes)[0]) == 9


def _moved(warm: WarmRank) -> list[bool]:
    """Types that are not reduced."""
    group = warm.open()
    right: list[bool] = []
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64):
        tensor = (torch.arange(5) + 10 * group.rank).to(dtype)
        output = torch.empty(5 * group.size, dtype=dtype)
        group.all_gather(output, tensor).wait()
        group.broadcast(tensor, 1).wait()
        right.append(torch.equal(output[5:10].view(torch.uint8), tensor.view(torch.uint8)))
    return right


def test_other_types_travel() -> None:
    with WarmRanks(2) as ranks:
        assert ranks.run(_moved) == [[True] * 4] * 2

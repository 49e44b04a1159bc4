"""Turns: ranks of one process go on one at a time, in order; a wait that nobody can end is an error, not a
hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from meshloom.comm.steps import Steps, Turns, advance_one, run_in_steps
from meshloom.core.errors import CollectiveError


def recorder(log: list[str], name: str, num_yields: int) -> Steps[str]:
    for number in range(num_yields):
        log.append(f"{name}{number}")
        yield
    log.append(f"{name} ends")
    return name


def test_steps_advance_in_rank_order_between_yields():
    log: list[str] = []
    assert run_in_steps([recorder(log, name, 2) for name in "abc"]) == ["a", "b", "c"]
    assert log == ["a0", "b0", "c0", "a1", "b1", "c1", "a ends", "b ends", "c ends"]


def test_a_single_rank_is_exhausted():
    assert run_in_steps([recorder([], "a", 3)]) == ["a"]


def test_no_yield_is_one_round():
    assert run_in_steps([recorder([], "a", 0), recorder([], "b", 0)]) == ["a", "b"]


def test_a_rank_that_finishes_early_is_named():
    with pytest.raises(CollectiveError, match=r"^Rank 1 finished while rank 0 still waits for it\.$"):
        run_in_steps([recorder([], "a", 2), recorder([], "b", 1)])


def test_a_failing_rank_closes_the_others():
    closed: list[str] = []

    def waits() -> Steps[None]:
        try:
            yield
            yield
        finally:
            closed.append("waits")

    def fails() -> Steps[None]:
        yield
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        run_in_steps([waits(), fails()])
    assert closed == ["waits"]


def test_advance_replaces_how_a_round_is_run():
    rounds: list[int] = []

    def backwards(ranks):
        rounds.append(len(ranks))
        return [advance_one(rank) for rank in reversed(ranks)][::-1]

    log: list[str] = []
    assert run_in_steps([recorder(log, name, 1) for name in "ab"], backwards) == ["a", "b"]
    assert log == ["b0", "a0", "b ends", "a ends"]
    assert rounds == [2, 2]


def waiting_ranks(turns: Turns, log: list[str], size: int) -> list[Callable[[], int]]:
    """Each writes, waits until all have written, writes again."""
    arrived: list[int] = []

    def rank(number: int) -> int:
        log.append(f"start {number}")
        arrived.append(number)
        turns.wait_for(lambda: len(arrived) == size, lambda: "never")
        log.append(f"go on {number}")
        return number * 10

    return [lambda number=number: rank(number) for number in range(size)]


def test_functions_take_turns_in_rank_order_every_time():
    logs = []
    for _ in range(20):
        log: list[str] = []
        turns = Turns()
        assert turns.run(waiting_ranks(turns, log, 3)) == [0, 10, 20]
        logs.append(log)
    assert logs[0][:3] == ["start 0", "start 1", "start 2"]
    assert all(log == logs[0] for log in logs)


def test_a_wait_that_none_can_end_names_who_waits():
    turns = Turns()

    def waits() -> None:
        turns.wait_for(lambda: False, lambda: "all_reduce on rank 0 waits for rank 1")

    with pytest.raises(CollectiveError, match="^all_reduce on rank 0 waits for rank 1$"):
        turns.run([waits, lambda: None])


def test_all_waiting_for_each_other_is_an_error():
    turns = Turns()

    def waits(number: int) -> None:
        turns.wait_for(lambda: False, lambda: f"rank {number} waits")

    with pytest.raises(CollectiveError, match="^rank 0 waits$"):
        turns.run([lambda number=number: waits(number) for number in range(3)])


def test_a_wait_lasts_as_long_as_others_get_on():
    # Two replicas of two ranks: one reads a program of its own, in many waits between its ranks, and the
    # other waits for it.
    turns, done = Turns(), list[int]()

    def reads(number: int) -> int:
        for _ in range(50):
            turns.wait_for(lambda: len(done) % 2 == number, lambda: "never")
            done.append(number)
        return number

    def waits() -> int:
        turns.wait_for(lambda: len(done) == 100, lambda: "gave up")
        return len(done)

    assert turns.run([waits, waits, lambda: reads(0), lambda: reads(1)]) == [100, 100, 0, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_what_autocast_has_cast_stays_while_another_rank_leaves_its_region(size: int):
    """The story: a weight's three uses in a loss had one cast on one device, and two with simulated ranks, since one that ended
    its loss made torch forget the casts of all."""
    turns, left = Turns(), list[int]()

    def casts(number: int) -> tuple[int, int]:
        weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
            turns.wait_for(lambda: len(left) >= number, lambda: "never")  # those of lower numbers have left
            z = x @ weight
        left.append(number)
        turns.wait_for(lambda: len(left) == size, lambda: "never")
        with torch.autocast("cpu", torch.bfloat16):  # a loss of its own
            again = x @ weight
        casts = [each.grad_fn.next_functions[1][0] for each in (y, z, again)]
        return len(set(casts[:2])), len(set(casts))

    assert turns.run([lambda number=number: casts(number) for number in range(size)]) == [(1, 2)] * size
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_exception_ends_all(failing: int):
    turns = Turns()
    went_on: list[int] = []

    def rank(number: int) -> None:
        if number == failing:
            raise ValueError(f"rank {number}")
        turns.wait_for(lambda: False, lambda: "never")
        went_on.append(number)

    # Ranks before the failing one wait already; those after it have not started.
    with pytest.raises(ValueError, match=f"^rank {failing}$"):
        turns.run([lambda number=number: rank(number) for number in range(3)])
    assert went_on == []


def test_turns_are_active_inside_and_only_there():
    turns = Turns()
    assert not turns.active
    assert turns.run([lambda: turns.active, lambda: turns.active]) == [True, True]
    assert not turns.active


def test_waiting_leaves_a_ranks_draws_alone():
    def rank(number: int, turns: Turns, started: list[int]) -> list[float]:
        torch.manual_seed(number)
        first = torch.rand(()).item()
        started.append(number)
        turns.wait_for(lambda: len(started) == 2, lambda: "never")
        return [first, torch.rand(()).item()]

    turns, started = Turns(), []
    together = turns.run([lambda number=number: rank(number, turns, started) for number in range(2)])
    for number in range(2):
        torch.manual_seed(number)
        assert together[number] == torch.rand(2).tolist()


def test_waiting_leaves_a_ranks_draws_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch):
    """Ranks that share it share its generator: dropout went on with the draws of the rank that had run meanwhile."""
    gpu = torch.Generator()  # in place of a GPU's
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    turns, started = Turns(), list[int]()

    def rank(number: int) -> list[float]:
        gpu.manual_seed(number)
        first = torch.rand((), generator=gpu).item()
        started.append(number)
        turns.wait_for(lambda: len(started) == 2, lambda: "never")
        return [first, torch.rand((), generator=gpu).item()]

    together = turns.run([lambda number=number: rank(number) for number in range(2)])
    assert together == [torch.rand(2, generator=gpu.manual_seed(number)).tolist() for number in range(2)]


def test_grad_mode_is_each_ranks_own():
    turns = Turns()
    started: list[int] = []

    def rank(number: int) -> bool:
        started.append(number)
        with torch.set_grad_enabled(number == 0):
            turns.wait_for(lambda: len(started) == 2, lambda: "never")
            return torch.is_grad_enabled()

    assert turns.run([lambda: rank(0), lambda: rank(1)]) == [True, False]


def test_turns_can_be_used_again_and_leave_no_thread():
    turns = Turns()
    before = threading.active_count()
    for _ in range(3):
        log: list[str] = []
        assert turns.run(waiting_ranks(turns, log, 2)) == [0, 10]
    assert threading.active_count() == before

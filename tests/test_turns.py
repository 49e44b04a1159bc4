"""Turns: ranks of one process go on one at a time, in order; a wait that nobody can end is an error, not a
hang."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from jobs import make_job
from torch import nn

from meshloom.comm.turns import Turns, in_turns, wait_until
from meshloom.core.errors import CollectiveError
from meshloom.core.random import python_draws_of
from meshloom.train.trainer import Trainer


def waiting_ranks(log: list[str], size: int) -> list[Callable[[], int]]:
    """Each writes, waits until all have written, writes again."""
    arrived: list[int] = []

    def rank(number: int) -> int:
        log.append(f"start {number}")
        arrived.append(number)
        wait_until(lambda: len(arrived) == size, lambda: "never")
        log.append(f"go on {number}")
        return number * 10

    return [partial(rank, number) for number in range(size)]


def test_ranks_take_turns_in_their_order_every_time():
    logs = []
    for _ in range(20):
        log: list[str] = []
        assert in_turns(waiting_ranks(log, 3)) == [0, 10, 20]
        logs.append(log)
    assert logs[0] == ["start 0", "start 1", "start 2", "go on 2", "go on 0", "go on 1"]
    assert all(log == logs[0] for log in logs)


def test_who_waits_for_nothing_keeps_the_turn():
    log: list[str] = []

    def rank(number: int) -> None:
        for _ in range(2):
            log.append(str(number))
            wait_until(lambda: True, lambda: "never")

    in_turns([partial(rank, number) for number in range(2)])
    assert log == ["0", "0", "1", "1"]


def test_a_wait_for_a_rank_that_returns_names_both_and_the_line():
    def waits() -> None:
        wait_until(lambda: False, lambda: "all_reduce on rank 0 waits for rank 1.")

    with pytest.raises(
        CollectiveError,
        match=rf"^all_reduce on rank 0 waits for rank 1\. It is at {__file__}:\d+\.\nRank 1 has returned\.$",
    ):
        in_turns([waits, lambda: None])


def test_a_cycle_of_waits_names_all_and_their_lines():
    def first() -> None:
        wait_until(lambda: False, lambda: "rank 0 waits for rank 1.")

    def second() -> None:
        wait_until(lambda: False, lambda: "rank 1 waits for rank 0.")

    with pytest.raises(CollectiveError, match=r"^rank 0 waits for rank 1\. ") as caught:
        in_turns([first, second])
    here = [function.__code__.co_firstlineno + 1 for function in (first, second)]
    lines = [
        f"rank {rank} waits for rank {1 - rank}. It is at {__file__}:{line}."
        for rank, line in enumerate(here)
    ]
    assert str(caught.value) == "\n".join(lines)


def test_a_wait_lasts_as_long_as_others_get_on():
    """Two replicas of two ranks: one reads a program of its own, in many waits between its ranks, and the other waits for it."""
    done: list[int] = []

    def reads(number: int) -> int:
        for _ in range(50):
            wait_until(lambda: len(done) % 2 == number, lambda: "never")
            done.append(number)
        return number

    def waits() -> int:
        wait_until(lambda: len(done) == 100, lambda: "gave up")
        return len(done)

    assert in_turns([waits, waits, partial(reads, 0), partial(reads, 1)]) == [100, 100, 0, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_what_autocast_has_cast_stays_while_another_rank_leaves_its_region(size: int):
    """The story: a weight's three uses in a loss had one cast on one device, and two with simulated ranks, since one that ended
    its loss made torch forget the casts of all."""
    left: list[int] = []

    def casts(number: int) -> tuple[int, int]:
        weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
            wait_until(lambda: len(left) >= number, lambda: "never")  # those of lower numbers have left
            z = x @ weight
        left.append(number)
        wait_until(lambda: len(left) == size, lambda: "never")
        with torch.autocast("cpu", torch.bfloat16):  # a loss of its own
            again = x @ weight
        casts = [each.grad_fn.next_functions[1][0] for each in (y, z, again)]
        return len(set(casts[:2])), len(set(casts))

    assert in_turns([partial(casts, number) for number in range(size)]) == [(1, 2)] * size
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


def test_what_fails_while_a_rank_waits_for_it_ends_all():
    """Asked for by another rank, whose part is over."""
    asked: list[int] = []

    def arrived() -> bool:
        asked.append(1)
        if len(asked) > 1:
            raise ValueError("it broke on the way")
        return False

    with pytest.raises(ValueError, match="^it broke on the way$"):
        in_turns([lambda: wait_until(arrived, lambda: "never"), lambda: None])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_exception_ends_the_others_one_after_the_other(failing: int):
    log: list[str] = []

    def rank(number: int) -> None:
        if number == failing:
            raise ValueError(f"rank {number}")
        try:
            wait_until(lambda: False, lambda: "never")
        except CollectiveError as error:
            log.append(str(error))
            time.sleep(0.01)
            log.append("unwound")
            raise

    # Ranks before the failing one wait already; those after it have not started.
    with pytest.raises(ValueError, match=f"^rank {failing}$"):
        in_turns([partial(rank, number) for number in range(3)])
    ended = [[f"Rank {number} ends because another rank failed.", "unwound"] for number in range(failing)]
    assert log == [line for each in ended for line in each]


def test_who_unwinds_may_not_wait_again():
    """Its `finally` is told so at once, instead of letting others go on in the middle of it."""
    told: list[str] = []

    def unwinds() -> None:
        try:
            wait_until(lambda: False, lambda: "never")
        finally:
            with pytest.raises(CollectiveError, match=r"^Rank 0 ends because another rank failed\.$"):
                wait_until(lambda: True, lambda: "never")
            told.append("rank 0")

    def fails() -> None:
        raise ValueError("rank 1")

    with pytest.raises(ValueError, match="^rank 1$"):
        in_turns([unwinds, fails])
    assert told == ["rank 0"]


def test_an_interrupted_run_ends_its_ranks_at_their_next_wait():
    """As Ctrl-C does it, which arrives in the main thread."""
    log: list[str] = []

    def rank(number: int) -> None:
        if number == 0:
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.005)
            wait_until(lambda: True, lambda: "never")
        log.append("went on")

    with pytest.raises(KeyboardInterrupt):
        in_turns([partial(rank, 0), partial(rank, 1)])
    assert log == []
    assert in_turns([lambda: 1]) == [1]


def test_a_second_interrupt_ends_a_rank_that_does_not_wait():
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    ended: list[str] = []

    def computes() -> None:
        try:
            for _ in range(2000):
                time.sleep(0.005)
            ended.append("by itself")
        except KeyboardInterrupt:
            ended.append("interrupted")
            raise

    timer.start()
    again.start()
    with pytest.raises(KeyboardInterrupt):
        in_turns([computes, lambda: ended.append("the other one")])
    assert ended == ["interrupted"]
    timer.join()
    again.join()


def test_waiting_leaves_a_ranks_draws_alone():
    started: list[int] = []

    def rank(number: int) -> list[float]:
        torch.manual_seed(number)
        with python_draws_of(number):
            first = [torch.rand(()).item(), random.random(), numpy.random.rand()]
            started.append(number)
            wait_until(lambda: len(started) > 1, lambda: "never")
            return [*first, torch.rand(()).item(), random.random(), numpy.random.rand()]

    together = in_turns([partial(rank, number) for number in range(2)])
    for number in range(2):
        assert together[number] == rank(number)


def test_waiting_leaves_a_ranks_draws_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch):
    """Ranks that share it share its generator: dropout went on with the draws of the rank that had run meanwhile."""
    gpu = torch.Generator()  # in place of a GPU's
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    started: list[int] = []

    def rank(number: int) -> list[float]:
        gpu.manual_seed(number)
        first = torch.rand((), generator=gpu).item()
        started.append(number)
        wait_until(lambda: len(started) == 2, lambda: "never")
        return [first, torch.rand((), generator=gpu).item()]

    together = in_turns([partial(rank, number) for number in range(2)])
    assert together == [torch.rand(2, generator=gpu.manual_seed(number)).tolist() for number in range(2)]


def test_grad_mode_is_each_ranks_own():
    started: list[int] = []

    def rank(number: int) -> bool:
        started.append(number)
        with torch.set_grad_enabled(number == 0):
            wait_until(lambda: len(started) == 2, lambda: "never")
            return torch.is_grad_enabled()

    assert in_turns([partial(rank, 0), partial(rank, 1)]) == [True, False]


def test_the_default_device_is_that_of_who_runs_them():
    torch.set_default_device("meta")
    try:
        assert in_turns([lambda: torch.empty(1).device.type] * 2) == ["meta", "meta"]
    finally:
        torch.set_default_device(None)
    assert in_turns([lambda: torch.empty(1).device.type] * 2) == ["cpu", "cpu"]


def test_threads_live_as_long_as_their_turns():
    turns, before = Turns(), threading.active_count()
    seen = [turns.run([threading.get_ident] * 2) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2] and len(set(seen[0])) == 2
    assert threading.active_count() == before + 2
    turns.close()
    assert threading.active_count() == before


def test_threads_end_with_turns_that_nobody_closes():
    before = threading.active_count()
    turns = Turns()
    turns.run([lambda: None] * 2)
    assert threading.active_count() == before + 2
    del turns
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_who_is_no_rank_does_not_wait():
    wait_until(lambda: True, lambda: "never")
    with pytest.raises(CollectiveError, match=r"^it will not come$"):
        wait_until(lambda: False, lambda: "it will not come")


def test_simulated_ranks_compute_on_one_thread_each_and_alike():
    """With pools of two threads the replicas of a larger model differed after a step in two of eleven runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [_trained("dp=4") for _ in range(2)]
    finally:
        here, _ = torch.get_num_threads(), torch.set_num_threads(before)
    assert here == 2 and found[0] == found[1]
    assert found[0][0] == [1] * 4


def _trained(plan: str) -> tuple[list[int], list[bytes]]:
    """Threads of torch on each rank, and the bits of the parameters after a few steps."""
    job = replace(
        make_job("mlp", "adamw"),
        model=lambda: nn.Sequential(
            nn.Linear(7, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5)
        ),
    )
    with Trainer(job, plan, devices="simulated") as trainer:
        assert "on 1 thread" in trainer.world.why
        for batch in trainer.batches():
            trainer.step(batch)
        threads = trainer.together(lambda replica: torch.get_num_threads())
        return threads, [each.detach().numpy().tobytes() for each in trainer.replicas[-1].model.parameters()]

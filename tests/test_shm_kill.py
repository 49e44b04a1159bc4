"""A rank that is killed at any moment of a run of collectives: the others name it and the collective in a
moment, and nothing is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest
import torch
from warm_ranks import WarmRank, WarmRanks

from meshloom.comm.group import Work
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.core.errors import MeshloomError, PeerLostError

pytestmark = pytest.mark.processes
SECONDS_TO_TELL = 2.0
SIZES = (1, 1000, 50_000, 700_000)


def _collectives_for_ever(warm: WarmRank, timeout_seconds: float) -> tuple[type[MeshloomError], str, float]:
    """Collectives of all kinds and sizes, several under way; what ends it, and when."""
    group = warm.open(timeout_seconds=timeout_seconds)
    inside = group.window(4 * max(SIZES)).of(group.rank).view(torch.float32)
    chooser = random.Random(0)  # the same on all ranks
    warm.store.set(f"began/{warm.rank}", "")
    try:
        while True:
            works = [
                _start(group, chooser.choice(KINDS), chooser.choice(SIZES), inside)
                for _ in range(chooser.randint(1, 3))
            ]
            for work in works:
                work.wait()
    except MeshloomError as error:
        return type(error), str(error), time.monotonic()


KINDS = ("all_reduce", "in place", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")


def _start(group: ShmGroup, kind: str, count: int, inside: torch.Tensor) -> Work:
    n = group.size
    tensor, whole = torch.ones(count), torch.ones(n * count)
    match kind:
        case "all_reduce":
            return group.all_reduce(tensor)
        case "in place":
            return group.all_reduce(inside[:count])
        case "all_gather":
            return group.all_gather(whole, tensor)
        case "reduce_scatter":
            return group.reduce_scatter(tensor, whole)
        case "broadcast":
            return group.broadcast(tensor, count % n)
        case "all_to_all":
            return group.all_to_all(whole, whole.clone(), [count] * n, [count] * n)
        case _:
            return group.barrier()


def kill_one(size: int, killed: int, after_seconds: float) -> list[float]:
    """Seconds until each of the others had told."""
    with WarmRanks(size) as ranks:
        ranks.start(_collectives_for_ever, 20.0)
        ranks.wait_for([f"began/{rank}" for rank in range(size)])
        time.sleep(after_seconds)
        os.kill(ranks.pids[killed], signal.SIGKILL)
        at = time.monotonic()
        answers = ranks.results(30.0, without=[killed])
    told: list[float] = []
    for rank in range(size):
        if rank != killed:
            kind, text, when = answers[rank]
            assert kind is PeerLostError, text
            assert re.fullmatch(
                rf"rank {rank} \(dp={rank}\) lost rank {killed} \(dp={killed}\), whose process has ended, "
                r"in (barrier|all_to_all|(all_reduce|all_gather|reduce_scatter|broadcast|all_to_all) of float32\[\d+\])\.",
                text,
            ), text
            told.append(when - at)
    return told


def test_a_killed_rank_is_named_by_all_others() -> None:
    for killed in range(3):
        kill_one(3, killed, 0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_kills_at_random_moments() -> None:
    chooser = random.Random(0)
    before = set(os.listdir("/dev/shm"))
    for number in range(50):
        size = chooser.choice([2, 3, 4])
        told = kill_one(size, number % size, chooser.uniform(0.0, 0.5))
        assert max(told) < SECONDS_TO_TELL
        assert set(os.listdir("/dev/shm")) <= before
    # that no process is left is what the fixtures of all tests see to


def test_a_stopped_rank_is_named_at_the_timeout() -> None:
    with WarmRanks(3) as ranks:
        ranks.start(_collectives_for_ever, 1.0)
        ranks.wait_for([f"began/{rank}" for rank in range(3)])
        os.kill(ranks.pids[1], signal.SIGSTOP)
        answers = ranks.results(30.0, without=[1])
    for rank in (0, 2):
        kind, text, _ = answers[rank]
        assert kind is PeerLostError
        assert text.startswith(f"rank {rank} (dp={rank}) waited too long for "), text
        assert "longer than the timeout of 1 s" in text

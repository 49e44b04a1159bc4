"""Rounds of a benchmark on ranks that take the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

Step = Callable[[], float]  # the loss of the whole batch, or of this rank's share
Prepare = Callable[[], Step]  # read the next batch, which is not timed


def time_round(prepare: Prepare, num_steps: int) -> tuple[float, float]:
    """Seconds per step of the slowest rank, and the first loss averaged over the ranks."""
    duration, losses = 0.0, list[float]()
    for _ in range(num_steps):
        step = prepare()
        dist.barrier()
        started = time.perf_counter()
        losses.append(step())
        duration += time.perf_counter() - started
    slowest, first = torch.tensor(duration / num_steps), torch.tensor(losses[0])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(first)
    return slowest.item(), first.item() / dist.get_world_size()


def end_rounds() -> None:
    """Before groups of Gloo end: its threads drop the last tensors, for which they need the GIL, and a group that ends holds
    it while it waits for them, for ever."""
    time.sleep(1.0)

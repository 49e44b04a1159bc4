"""Stages that wait instead of computing, so that what is measured is the executor: how much of a step ranks
are idle, beside the formula."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from overhead import chain, empty_stage
from torch import Tensor

from meshloom.comm.torch.c10d import C10dGroup
from meshloom.pipeline.runtime.run import PipelineRun
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.timing import run_on_paper
from meshloom.program.ir.nodes import Meta

PARTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # of what a forward takes


def time_schedules(
    names: list[str], num_microbatches: int, rounds: int, num_bytes: int, seconds: float
) -> list[dict[str, Any]]:
    """On each of the ranks; a record per schedule. They are timed in turns, the first round warms up.

    num_bytes: of the value that goes from each stage to the next, and of its gradient. seconds: of a
        microbatch's forward through all stages of a rank.
    """
    assert dist.group.WORLD is not None
    group = C10dGroup(dist.group.WORLD, [f"rank {rank}" for rank in range(dist.get_world_size())])
    made = {
        name: Waiting(make_schedule(name, group.size, num_microbatches), group, num_bytes, seconds)
        for name in names
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names[:: -1 if number % 2 else 1]:
            measured = made[name].step()
            if number:
                found[name].append(measured)
    return [_record(made[name], found[name]) for name in names]


class Waiting:
    """A pipeline whose stages sleep. A schedule with several stages on a rank divides the time among them."""

    def __init__(self, schedule: Schedule, group: C10dGroup, num_bytes: int, seconds: float) -> None:
        self.schedule, self._group = schedule, group
        share = group.size / schedule.num_stages
        self.seconds = {kind: seconds * parts * share for kind, parts in PARTS.items()}
        meta = Meta(shape=(num_bytes // 4,), dtype=torch.float32, stride=(1,), requires_grad=True)
        stages: Any = {
            number: Sleeper(number, schedule, self.seconds, meta) for number in schedule.stages_of(group.rank)
        }
        crossings = [chain(schedule.num_stages, meta)] * schedule.num_microbatches
        self._run = PipelineRun(schedule, group, stages, crossings, torch.device("cpu"))

    def step(self) -> dict[str, float]:
        """Seconds from the first start to the last end over all ranks, whose clock is one, and the mean share
        in which they are idle."""
        watch = Watch()
        dist.barrier()
        self._run.run([watch])
        mine = torch.tensor([watch.first, watch.last, watch.busy], dtype=torch.float64)
        table = [torch.empty_like(mine) for _ in range(self._group.size)]
        dist.all_gather(table, mine)
        first, last, busy = torch.stack(table).unbind(1)
        seconds = float(last.max() - first.min())
        return {"seconds": seconds, "idle": 1.0 - float(busy.mean()) / seconds}


class Sleeper:
    """A stage for `PipelineRun` that keeps what an empty one does, and sleeps. It hands over one tensor again
    and again."""

    def __init__(self, number: int, schedule: Schedule, seconds: Mapping[str, float], meta: Meta) -> None:
        self._seconds = seconds
        self._stage = empty_stage(
            number, schedule.num_stages, schedule.num_microbatches, bool(schedule.split), meta
        )
        self.receive, self.receive_gradients, self.clear = (
            self._stage.receive,
            self._stage.receive_gradients,
            self._stage.clear,
        )

    def forward(self, microbatch: int) -> dict[str, Tensor]:
        """What leaves."""
        time.sleep(self._seconds["F"])
        return self._stage.forward(microbatch)

    def backward(self, microbatch: int) -> dict[str, Tensor]:
        """What goes back."""
        time.sleep(self._seconds["B"])
        return self._stage.backward(microbatch)

    def input_gradients(self, microbatch: int) -> dict[str, Tensor]:
        """What goes back."""
        time.sleep(self._seconds["I"])
        return self._stage.input_gradients(microbatch)

    def weight_gradients(self, microbatch: int) -> dict[str, Tensor]:
        """Nothing leaves."""
        time.sleep(self._seconds["W"])
        return self._stage.weight_gradients(microbatch)


class Watch:
    """first, last: when the first action began and the last ended. busy: seconds within actions."""

    def __init__(self) -> None:
        self.first, self.last, self.busy = float("inf"), 0.0, 0.0

    def began(self, action: Action) -> None:
        """What it needs is there."""
        self._began = time.perf_counter()
        self.first = min(self.first, self._began)

    def ended(self, action: Action) -> None:
        """It has run."""
        self.last = time.perf_counter()
        self.busy += self.last - self._began


def _record(waiting: Waiting, found: list[dict[str, float]]) -> dict[str, Any]:
    schedule = waiting.schedule
    paper = run_on_paper(schedule, lambda action: waiting.seconds[action.kind])
    record: dict[str, Any] = {
        "system": "meshloom",
        "mode": "waiting",
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
    }
    record |= {"microbatches": schedule.num_microbatches, "stages": schedule.num_stages}
    for key, on_paper in (("seconds", paper.length), ("idle", paper.mean_idle_share)):
        values = [each[key] for each in found]
        record[key] = {
            "median": statistics.median(values),
            "minimum": min(values),
            "maximum": max(values),
            "on_paper": on_paper,
        }
    if schedule.name in ("gpipe", "1f1b"):
        p, m = schedule.num_ranks, schedule.num_microbatches
        record["idle"]["formula"] = (p - 1) / (m + p - 1)
    return record

"""Stages of a pipeline that only take time, and a step of them that is recorded: for tests of what is
recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.mesh import MeshCoordinates
from meshloom.pipeline.runtime.recorder import Recorder, gather_timeline
from meshloom.pipeline.runtime.run import PipelineRun
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.stages import Crossing
from meshloom.program.ir.nodes import Meta
from meshloom.telemetry.timeline import Timeline

VALUE = Meta(shape=(2,), dtype=torch.float32, stride=(1,), requires_grad=True)


class StubStage:
    """Waits as long as its actions take, and makes the value that crosses. seconds: by kind of action."""

    def __init__(self, number: int, seconds: Mapping[str, float]) -> None:
        self._number, self._seconds = number, seconds

    def receive(self, microbatch: int, values: Mapping[str, Tensor]) -> None: ...

    def receive_gradients(self, microbatch: int, gradients: Mapping[str, Tensor]) -> None: ...

    def forward(self, microbatch: int) -> dict[str, Tensor]:
        return self._wait("F", {f"h{self._number}": torch.ones(2)})

    def backward(self, microbatch: int) -> dict[str, Tensor]:
        return self._wait("B", {f"h{self._number - 1}": torch.ones(2)})

    def input_gradients(self, microbatch: int) -> dict[str, Tensor]:
        return self._wait("I", {f"h{self._number - 1}": torch.ones(2)})

    def weight_gradients(self, microbatch: int) -> dict[str, Tensor]:
        return self._wait("W", {})

    def clear(self) -> None: ...

    def _wait(self, kind: str, made: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._seconds:
            time.sleep(self._seconds[kind])
        return made


def stub_run(schedule: Schedule, group: Group, seconds: Mapping[str, float]) -> PipelineRun:
    """One rank's, of a chain of stages."""
    stages: Any = {number: StubStage(number, seconds) for number in schedule.stages_of(group.rank)}
    chain = [
        Crossing(value=f"h{number}", source=number, destination=number + 1, meta=VALUE)
        for number in range(schedule.num_stages - 1)
    ]
    return PipelineRun(schedule, group, stages, [chain] * schedule.num_microbatches, torch.device("cpu"))


def record_step(schedule: Schedule, group: Group, run: PipelineRun, step: int = 1) -> Timeline:
    """A step with everything in it that can be recorded, on the ranks along pp."""
    recorder = Recorder(torch.device("cpu"))
    recorder.begin()
    run.run([recorder])
    with recorder.span("exchange"):
        work = group.barrier()
        work.wait()
    with recorder.span("update"):
        torch.zeros(1)
    return gather_timeline(
        group,
        recorder.take(),
        step=step,
        place=MeshCoordinates(pp=group.rank),
        schedule=lambda microbatches: schedule,
    )

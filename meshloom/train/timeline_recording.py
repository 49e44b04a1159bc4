"""Timelines that a run keeps beside its checkpoints: of its first steps and its last, where there are
stages."""

from __future__ import annotations

from pathlib import Path

from meshloom.comm.steps import Steps
from meshloom.core.plan import Plan
from meshloom.pipeline.runtime.gather_timeline import gather_timeline
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.replica.replica import Replica
from meshloom.telemetry.timeline import Timeline
from meshloom.telemetry.timeline_files import Recording, is_kept, write_recording
from meshloom.train.local_replicas import LocalReplicas


class TimelineRecording:
    """out: None keeps none. start_step: steps done when this run began. steps: in all. main: whether this
    process writes."""

    def __init__(
        self,
        plan: Plan,
        replicas: LocalReplicas,
        out: Path | None,
        *,
        start_step: int,
        steps: int,
        main: bool,
    ) -> None:
        self._plan, self._replicas, self._out = plan, replicas, out
        self._start_step, self._steps, self._main = start_step, steps, main
        self._timelines: list[Timeline] = []

    def begin(self, step: int) -> bool:
        """Let the replicas' recorders note the step if its timeline is kept; whether it is. step: counted
        from 1."""
        kept = self._plan.pp > 1 and self._out is not None and is_kept(step, self._start_step, self._steps)
        for replica in self._replicas.all:
            replica.recorder = Recorder(replica.seat.device) if kept else None
        return kept

    def keep(self, step: int) -> None:
        """Add the timeline of the step just done to those in `out`."""

        def gather(replica: Replica) -> Steps[Timeline]:
            schedule = replica.engine.schedule(self._plan.microbatches)
            assert replica.recorder and schedule
            return gather_timeline(
                replica.seat.world,
                replica.recorder.take(),
                step=step,
                place=replica.seat.place,
                schedule=schedule,
            )

        self._timelines.append(self._replicas.together(gather)[0])
        if self._main and self._out is not None:
            write_recording(self._out, Recording(plan=str(self._plan), timelines=tuple(self._timelines)))

"""Pipeline timelines of the first and last steps of a run, written beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

from meshloom.core.plan import Plan
from meshloom.pipeline.runtime.recorder import Recorder, gather_timeline
from meshloom.replica.replica import Replica
from meshloom.telemetry.step_result import StepResult
from meshloom.telemetry.timeline import Timeline
from meshloom.telemetry.timeline_files import Recording, is_kept, write_recording
from meshloom.train.local_replicas import LocalReplicas


class TimelineRecording:
    """Of a run under pp. out: where to. start_step: steps done when this run began. steps: of the whole run. main: whether this
    process writes."""

    def __init__(
        self,
        plan: Plan,
        replicas: LocalReplicas,
        out: Path,
        *,
        start_step: int,
        steps: int,
        main: bool,
    ) -> None:
        self._plan, self._replicas, self._out = plan, replicas, out
        self._start_step, self._steps, self._main = start_step, steps, main
        self._timelines: list[Timeline] = []

    def begin(self, step: int) -> None:
        """Turn the replicas' recorders on if the timeline of `step`, counted from 1, is kept."""
        kept = is_kept(step, self._start_step, self._steps)
        for replica in self._replicas.all:
            replica.recorder = Recorder(replica.context.device) if kept else None

    def keep(self, result: StepResult) -> None:
        """Write the timeline of the step just done into `out`, if it is kept."""
        if self._replicas.first.recorder is None:
            return

        def gather(replica: Replica) -> Timeline:
            assert replica.recorder
            return gather_timeline(
                replica.context.world,
                replica.recorder.take(),
                step=result.step + 1,
                place=replica.context.place,
                schedule=replica.engine.stages.schedule,
            )

        self._timelines.append(self._replicas.together(gather)[0])
        if self._main:
            write_recording(self._out, Recording(plan=str(self._plan), timelines=tuple(self._timelines)))

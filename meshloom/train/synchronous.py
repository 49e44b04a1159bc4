"""The training loop of a run whose ranks take every step together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import NoReturn

import torch

from meshloom.checkpoint.checkpoint import Checkpoint, passed_over
from meshloom.core.errors import CheckpointError, TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.shares import Shares
from meshloom.launch.events import send_event
from meshloom.launch.failure import report_stop
from meshloom.launch.processes.signals import StopRequests
from meshloom.launch.world import World
from meshloom.machine.process_memory import Shortage
from meshloom.replica.chunk_scope import Observer
from meshloom.replica.model_state import shown_names
from meshloom.replica.replica_state import take_notes
from meshloom.telemetry.progress import QUIET, Listener
from meshloom.telemetry.step_result import StepResult
from meshloom.telemetry.summary import Summary
from meshloom.telemetry.timings import Timings
from meshloom.train.batch_readers import BatchReaders
from meshloom.train.contract import Batch
from meshloom.train.evaluation import TeamEvaluation
from meshloom.train.idle_ranks import idle_lines_of
from meshloom.train.local_replicas import LocalReplicas
from meshloom.train.rank_comparison import CHECK_EVERY, RankComparison
from meshloom.train.run_checkpoints import RunCheckpoints
from meshloom.train.run_digest import run_digest
from meshloom.train.share_measurement import ShareMeasurement
from meshloom.train.step_meter import ProgressLines, StepMeter
from meshloom.train.timeline_recording import TimelineRecording


class SynchronousRun:
    """A job under a plan in `world`.

    `next_step`: steps done; set to another, `batches()` goes on with the data of that step. losses: of several, the newest of each. digest: of what runs.
    saved: the newest checkpoint of `after_step`.
    leave: closes this run and then the world, while all ranks are still there.
    """

    def __init__(
        self, job: Job, plan: Plan, world: World, listener: Listener, shares: Shares, timings: Timings, *, steps: int, out: Path | None,
        resume: Path | None, overwrite: bool, dtype: torch.dtype | None, share: bool, cache: str, overcommit: bool, leave: Callable[[], None],
    ) -> None:  # fmt: skip
        if resume is not None:  # weights were read before
            job = replace(job, weights=None, weight_names=None)
        self._job, self._plan, self._world, self._shares, self._timings = job, plan, world, shares, timings
        self._steps, self._out, self._leave, self._share = steps, out, leave, share
        self._stop_requests = StopRequests()
        self._listener = listener = listener if world.main else QUIET
        self._is_whole = plan.mesh.size == plan.dp  # every rank a replica
        self._asked = self._closed = False  # asked: all ranks know that some of them asks for something
        self.next_step, self.losses = 0, dict[str, float]()
        self._evaluated, self.saved = dict[str, float](), None
        with ExitStack() as building:
            building.callback(self._stop_requests.close)
            self.replicas = LocalReplicas(
                job, plan, world, dtype=dtype, share=share, cache=cache, timings=timings, files=out, resumed=resume is not None
            )  # fmt: skip
            building.callback(self.replicas.close)
            first = self.replicas.first
            for replica in self.replicas.all:
                # to stop; or for all to know that it could not save in the background
                replica.asks = (lambda: bool(self._stop_requests.received) or self._checkpoints.failed) if out else None  # fmt: skip
            self._checkpoints = RunCheckpoints(job, plan, shares, self.replicas, out, listener, resume=resume, overwrite=overwrite)  # fmt: skip
            building.callback(self._checkpoints.close)
            self.replicas.prepare(overcommit=overcommit, cache=cache)
            self.digest = self.replicas.together(run_digest)[0]
            self.data = BatchReaders(job, plan, shares, self.replicas, timings, steps=steps)
            self._measurement: ShareMeasurement | None = None
            if plan.shares == "measured":
                self._measurement = ShareMeasurement(job, plan, shares, self.replicas, listener, simulated=world.kind == "simulated")  # fmt: skip
            self._comparison = RankComparison(plan, self.replicas)
            self._meter = StepMeter(job, plan, self.replicas)
            self.evaluation = TeamEvaluation(job, plan, shares, self.replicas, self._meter, timings)
            if resume is not None:
                self._resume(resume)
            Shortage.trim()
            self._recording: TimelineRecording | None = None
            if out is not None and first.inner.pp > 1:
                self._recording = TimelineRecording(plan, self.replicas, out, start_step=self.next_step, steps=steps, main=world.main)  # fmt: skip
            listener.started(_beginning(plan, world, one_copy=first.exchange.ownership.memory == "shared"))
            self.replicas.show_warnings()
            _tell(listener, [*first.notes(), *idle_lines_of(first, plan, job.batch_size), *self.replicas.warnings])  # fmt: skip
            self.replicas.enter("between steps", self.next_step)
            self._stack = building.pop_all()

    def close(self) -> None:
        """End reader processes and remove the hooks from the models."""
        self._closed = True
        self.data.close()
        self._stack.close()

    def fit(self) -> Summary:
        """Train to the last step, evaluating and saving when due."""
        began = time.monotonic()
        with ProgressLines(self._listener.step) as lines:
            for batch in self.batches():
                loss = self.step(batch)
                if self._world.main:
                    progress = self._meter.progress(self.next_step, self._steps, loss, self._world.memory_bytes())  # fmt: skip
                    lines.add(replace(progress, saving=self._checkpoints.written_share), self._meter.norm)
                self.after_step(last=self.next_step == self._steps, tell=lines.tell)
        summary = self.summary(time.monotonic() - began, self._evaluated, self.saved)
        self._listener.ended(summary)
        return summary

    def after_step(self, *, last: bool, tell: Callable[[], None] = lambda: None) -> None:
        """What `fit()` does after a step: evaluate and save, if it is due or the step was the last. tell: is called before."""
        given, every = self._job.evaluate, self._job.checkpoint_every
        if given and (last or self.next_step % given.every == 0):
            tell()
            self._evaluated = self.evaluate(due=self.next_step % given.every == 0)
            self._listener.evaluated(self.next_step, self._evaluated)
            if _keep_best(self.evaluation, self._checkpoints, self.next_step, self._evaluated) and not last:
                self._listener.note(f"Training ends after step {self.next_step} of {self._steps}: {self.evaluation.best}.")  # fmt: skip
                self._steps, last = self.next_step, True
        if self._checkpoints.saves and (last or (every and self.next_step % every == 0)):
            tell()
            self.saved = self._save(wait=last, later=True)
        self._checkpoints.tell_saved()

    def batches(self) -> Iterator[Batch]:
        """This process's share of every remaining global batch; see `Trainer.batches`."""
        if self.next_step < self._steps:
            _tell(self._listener, self._comparison.read_data(self._job))
            self.evaluation.try_out(self.next_step)
        try:
            if self._out:
                self._stop_requests.open()
            self.data.open(self.next_step)
            while self.next_step < self._steps:
                if self._asked or (self._stop_requests.received and len(self.replicas.all) == self._plan.mesh.size):  # fmt: skip
                    self._stop()
                with self._meter.reading():
                    batch = self.data.read(self.next_step)
                yield batch
                if self.next_step == batch.step and not self._closed:
                    raise TrainingError(
                        f"The batch of step {batch.step + 1} was not trained, and the next one was asked for. Give each to Trainer.step() before that."
                    )
        finally:
            self._stop_requests.close()
            self.data.close()

    def step(self, batch: Batch) -> float:
        """Train on a batch of `batches()`; returns the mean loss of the global batch."""
        self.data.check(batch, self.next_step)
        if self._out and not self._stop_requests.armed:
            self._stop_requests.arm()
            send_event({"event": "saves"}) if self._stop_requests.armed else None
        replicas, meter = self.replicas, self._meter
        with meter.stepping():
            recorded = self._recording if self._recording and self._recording.begin(batch.step + 1) else None
            with self._timings.of("steps" if meter.num_steps else "first step"), replicas.computing():
                result = replicas.together(
                    lambda replica: replica.step(batch.step, batch.shares[replicas.all.index(replica)])
                )[0]
            self.next_step = batch.step + 1
            self._asked = result.asked
            replicas.enter("comparing", self.next_step)
            with self._timings.of("comparing ranks"):
                self._comparison.after_step(self.next_step, self._steps, meter)
                replicas.check_first_step(saved=bool(self._out)) if not meter.num_steps else None
                if self._measurement:
                    self._measurement.after_step(self.next_step, self._steps)
            replicas.enter("between steps", self.next_step)
        if recorded:
            recorded.keep(self.next_step)
        _came_to(meter, result, self._listener, replicas)
        self.losses = dict(result.losses)
        if result.asked:
            self._checkpoints.finish()
        last = self.next_step == self._steps
        if last or meter.num_steps == 1 or self.next_step % CHECK_EVERY == 0 or self._is_whole:
            _tell(self._listener, replicas.together(take_notes)[0])
        if last and (told := replicas.first.engine.stages.readings):
            self._listener.note(told)
        return result.loss

    def evaluate(self, *, due: bool = True) -> dict[str, float]:
        """Every metric of the job's `Evaluate`, averaged over all of its data. due: schedulers that go by one are stepped."""
        self._checkpoints.finish_copies()
        with self._timings.of("evaluating"):
            found = self.evaluation.evaluate(self.next_step, due=due)
        _tell(self._listener, self.replicas.together(take_notes)[0])
        return found

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the state after the newest step into `out`; returns its path. wait: of
        `RunCheckpoints.save`. A loop of one's own may change anything afterwards, unless replicas may have one copy."""
        return self._save(wait=wait, later=self._share)

    def observe(self, observers: Sequence[Observer | None]) -> None:
        """Let these observe the steps of this process's replicas, one each. They compare what ranks hold, which the run then
        leaves to them."""
        for replica, observer in zip(self.replicas.all, observers, strict=True):
            at, before = replica.attached, replica.scope.observer
            if before is not None:
                at.computed.remove(before.computed)
                at.updated.remove(before.updated)
            replica.scope.observer = observer
            if observer is not None:
                at.computed.append(observer.computed)
                at.updated.append(observer.updated)
        self._comparison.is_on = False

    def save_into(self, out: Path, released: Event | None = None) -> None:
        """Write checkpoints into `out` from now on. released: of `RunCheckpoints`. All ranks call it."""
        self._checkpoints = RunCheckpoints(
            self._job, self._plan, self._shares, self.replicas, out, self._listener, resume=None, overwrite=True, released=released,
            also=self._checkpoints.also,
        )  # fmt: skip

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises why it could not be."""
        self._checkpoints.finish()

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes and seconds of the steps so far, of this process's first rank."""
        return self._meter.summary(seconds, evaluation, checkpoint)

    def _save(self, *, wait: bool, later: bool) -> Path:
        with self._timings.of("saving"):
            return self._checkpoints.save(self.next_step, wait=wait, later=later)

    def _stop(self) -> NoReturn:
        """Stop on request: save, explain, and exit with the exit code of the signal."""
        number = self._stop_requests.received[0] if self._stop_requests.received else None
        self._checkpoints.finish()
        if self._checkpoints.newest is None or self._checkpoints.newest[0] != self.next_step:
            self.save()
        self._checkpoints.tell_saved()
        why = f"by {signal.Signals(number).name}" if number else "because another rank was asked to"
        text = f"Stopped {why} after step {self.next_step} of {self._steps}, which is saved. Go on with --resume {self._out}."
        main, code = self._world.main, 128 + (number or signal.SIGTERM)
        self._leave()
        report_stop(text, code, main=main)
        raise SystemExit(code)

    def _resume(self, directory: Path) -> None:
        with self._timings.of("loading"):
            checkpoint = self._checkpoints.resume(directory, self._steps)
        _tell(self._listener, _notes_on(checkpoint, self.replicas, main=self._world.main))
        if self._measurement:
            self._measurement.go_on_with(checkpoint)
        self.next_step = checkpoint.step
        _go_on_with_best(self.evaluation, self._checkpoints, checkpoint)


def _keep_best(
    evaluation: TeamEvaluation, checkpoints: RunCheckpoints, step: int, metrics: dict[str, float]
) -> bool:
    """After an evaluation: save it if it is the best so far. Returns whether training stops."""
    if evaluation.best is None:
        return False
    evaluation.best = best = evaluation.best.after(step, metrics)
    checkpoints.also["best"] = best.to_dict()
    if checkpoints.saves and best.step == step:
        checkpoints.save(step, best=True)
    return best.stops


def _notes_on(checkpoint: Checkpoint, replicas: LocalReplicas, *, main: bool) -> list[str]:
    """On the checkpoint that is resumed. main: of the first process."""
    said = (checkpoint.meta.get("note") or passed_over(checkpoint.path)) if main else ""
    other = replicas.first.updater.state.other_settings(checkpoint.values["updater"]) if main else ""
    return [*filter(None, (said, other, _left_in_attributes(checkpoint) if main else ""))]


def _left_in_attributes(checkpoint: Checkpoint) -> str:
    """A note on what earlier versions kept of attributes; "": nothing."""
    saved = checkpoint.values.get("attributes", {})
    names = [*saved.get("tensors", ()), *saved.get("numbers", ())]
    if not names:
        return ""
    return f"The checkpoint has {shown_names(names)} of earlier versions, which are not kept any more: they begin as the model is built."


def _go_on_with_best(evaluation: TeamEvaluation, checkpoints: RunCheckpoints, checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` where there is nothing left to train."""
    if evaluation.best is None:
        return
    evaluation.best = best = evaluation.best.going_on(checkpoint.values.get("best"))
    checkpoints.also["best"] = best.to_dict()
    if best.stops:
        raise CheckpointError(
            f"{checkpoint.path} is of a run that has ended: {best}. Give Evaluate a larger patience to go on."
        )


def _tell(listener: Listener, notes: Sequence[str]) -> None:
    for note in notes:
        listener.note(note)


def _came_to(meter: StepMeter, result: StepResult, listener: Listener, replicas: LocalReplicas) -> None:
    meter.came_to(result)
    scale = replicas.first.sums.scale
    if result.skipped and scale is not None:
        listener.note(
            f"Step {result.step + 1} was skipped: gradients overflowed float16. The loss is now scaled by {scale.scale:g}."
        )


def _beginning(plan: Plan, world: World, *, one_copy: bool) -> str:
    """The first line about a run."""
    copies = "; one copy of parameters and optimizer state for all replicas" if one_copy else ""
    summed = "; replicas add up on a ring of messages" if plan.on_ring else ""
    return f"plan {plan} on {world.why}{copies}{summed}"

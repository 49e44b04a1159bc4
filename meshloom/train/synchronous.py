"""The training loop of a run whose ranks take every step together."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
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
from meshloom.telemetry.progress import QUIET, Listener, Progress, unheard
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

    `next_step`: steps done; set to another, `batches()` goes on with the data of that step. digest: of what runs.
    saved: the newest checkpoint of `after_step`.
    leave: closes this run and then the world, while all ranks are still there. times_steps: whether `timings` are of steps too.
    """

    def __init__(
        self, job: Job, plan: Plan, world: World, listener: Listener, shares: Shares, timings: Timings, *, steps: int, out: Path | None,
        resume: Path | None, overwrite: bool, dtype: torch.dtype | None, share: bool, cache: str, overcommit: bool, leave: Callable[[], None],
        times_steps: bool,
    ) -> None:  # fmt: skip
        if resume is not None:  # weights were read before
            job = replace(job, weights=None, weight_names=None)
        self._job, self._plan, self._world, self._shares, self._timings = job, plan, world, shares, timings
        self._steps, self._out, self._leave, self._share = steps, out, leave, share
        self._stop_requests = StopRequests()
        self._listener = listener = listener if world.main else QUIET
        self._asked = self._closed = False  # asked: all ranks know that some of them asks for something
        self.next_step = 0
        self._phase: Callable[[str], AbstractContextManager[None]] = (
            timings.of if times_steps else lambda _: nullcontext()
        )
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
                replica.sums.asks = (lambda: bool(self._stop_requests.received) or self._checkpoints.failed) if out else None  # fmt: skip
            self._checkpoints = RunCheckpoints(job, plan, shares, self.replicas, out, listener, resume=resume, overwrite=overwrite)  # fmt: skip
            building.callback(self._checkpoints.close)
            self.replicas.prepare(overcommit=overcommit, cache=cache)
            self.digest = self.replicas.together(run_digest)[0]
            self.data = BatchReaders(job, plan, shares, self.replicas, self._phase, steps=steps)
            self._measurement: ShareMeasurement | None = None
            if plan.shares == "measured":
                self._measurement = ShareMeasurement(job, plan, shares, self.replicas, listener, simulated=world.kind == "simulated")  # fmt: skip
            self._comparison = RankComparison(plan, self.replicas)
            self._meter = StepMeter(job, plan, self.replicas)
            self.evaluation = TeamEvaluation(job, plan, shares, self.replicas, self._meter, timings)
            if resume is not None:
                self._resume(resume)
            Shortage.trim()
            # called with the number of a step, counted from 1, before it, and with what it came to
            self._before: list[Callable[[int], None]] = []
            self._after: list[Callable[[StepResult], None]] = []
            self._attach()
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
        lines = ProgressLines(self._listener.step) if self._listener.step is not unheard else None
        with lines or nullcontext():
            for batch in self.batches():
                self.step(batch)
                if lines:
                    lines.add(self._progress(), self._meter.newest.norm)
                if self._job.evaluate or self._checkpoints.saves:
                    self.after_step(
                        last=self.next_step == self._steps, tell=lines.tell if lines else lambda: None
                    )
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
            with self._meter.between_steps():
                stops = _keep_best(self.evaluation, self._checkpoints, self.next_step, self._evaluated)
            if stops and not last:
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
            with self._meter.between_steps():
                self.evaluation.try_out(self.next_step)
        try:
            if self._out:
                self._stop_requests.open()
            self.data.open(self.next_step)
            while self.next_step < self._steps:
                if self._asked or (self._stop_requests.received and len(self.replicas.all) == self._plan.mesh.size):  # fmt: skip
                    self._stop()
                began = time.monotonic()
                batch = self.data.read(self.next_step)
                self._meter.reading += time.monotonic() - began
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
        replicas, done = self.replicas, batch.step + 1
        began, is_first, is_last = time.monotonic(), not self._meter.num_steps, done == self._steps
        for begin in self._before:
            begin(done)
        with self._phase("first step" if is_first else "steps"), replicas.computing():
            result = replicas.together(
                lambda replica: replica.step(batch.step, batch.shares[replicas.all.index(replica)])
            )[0]
        self.next_step = done
        if is_first or is_last or self._measurement or done >= self._comparison.due:
            self._compare(is_first=is_first)
        self._meter.add(result, time.monotonic() - began)
        for follow in self._after:
            follow(result)
        if is_first or is_last or done % CHECK_EVERY == 0:
            self._tell_notes(last=is_last)
        return result.loss

    def evaluate(self, *, due: bool = True) -> dict[str, float]:
        """Every metric of the job's `Evaluate`, averaged over all of its data. due: schedulers that go by one are stepped."""
        self._checkpoints.finish_copies()
        with self._timings.of("evaluating"), self._meter.between_steps():
            found = self.evaluation.evaluate(self.next_step, due=due)
        self._tell_notes()
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
        self._comparison.due = math.inf

    def save_into(self, out: Path) -> None:
        """Write checkpoints into `out` from now on. All ranks call it."""
        self._checkpoints = RunCheckpoints(
            self._job, self._plan, self._shares, self.replicas, out, self._listener, resume=None, overwrite=True,
            also=self._checkpoints.also,
        )  # fmt: skip

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises why it could not be."""
        self._checkpoints.finish()

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes and seconds of the steps so far, of this process's first rank."""
        return self._meter.summary(seconds, evaluation, checkpoint)

    def _attach(self) -> None:
        """What this run does before and after a step, beside it."""
        replicas, out = self.replicas, self._out
        for replica in replicas.all if Shortage.is_there else ():
            replica.attached.computed.append(lambda found: Shortage.trim())  # of activations
            replica.attached.updated.append(lambda result: Shortage.trim())
        if out is not None:
            self._before.append(self._arm)
        if out is not None and replicas.first.inner.pp > 1:
            recording = TimelineRecording(
                self._plan, replicas, out, start_step=self.next_step, steps=self._steps, main=self._world.main
            )  # fmt: skip
            self._before.append(recording.begin)
            self._after.append(recording.keep)
        if replicas.first.sums.scale is not None:
            self._after.append(self._tell_skipped)
        if out is not None:
            self._after.append(self._note_asked)
        writes = replicas.first.scope.ends_chunks or replicas.first.engine.stages.compiler is not None
        if writes and self._plan.mesh.size == self._plan.dp:  # every rank a replica, whose notes are its own
            self._after.append(lambda result: self._tell_notes())

    def _arm(self, step: int) -> None:
        """From the first step on there is something to save when the run is asked to stop."""
        if not self._stop_requests.armed:
            self._stop_requests.arm()
            send_event({"event": "saves"}) if self._stop_requests.armed else None

    def _note_asked(self, result: StepResult) -> None:
        self._asked = result.asked
        if result.asked:
            self._checkpoints.finish()

    def _tell_skipped(self, result: StepResult) -> None:
        scale = self.replicas.first.sums.scale
        if result.skipped and scale is not None:
            self._listener.note(
                f"Step {result.step + 1} was skipped: gradients overflowed float16. The loss is now scaled by {scale.scale:g}."
            )

    def _compare(self, *, is_first: bool) -> None:
        """What ranks must have alike, where that is due after a step."""
        done, replicas = self.next_step, self.replicas
        replicas.enter("comparing", done)
        with self._phase("comparing ranks"):
            self._comparison.after_step(done, self._steps, self._meter)
            replicas.check_first_step(saved=bool(self._out)) if is_first else None
            if self._measurement:
                self._measurement.after_step(done, self._steps)
        replicas.enter("between steps", done)

    def _tell_notes(self, *, last: bool = False) -> None:
        """What forwards have written, and the like, since it was told last. last: and what was captured in all of the run."""
        _tell(self._listener, self.replicas.together(take_notes)[0])
        if last and (told := self.replicas.first.engine.stages.readings):
            self._listener.note(told)

    def _progress(self) -> Progress:
        memory, saving = self._world.memory_bytes(), self._checkpoints.written_share
        return self._meter.progress(self.next_step, self._steps, memory_bytes=memory, saving=saving)

    def _save(self, *, wait: bool, later: bool) -> Path:
        with self._timings.of("saving"), self._meter.between_steps():
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
        with self._timings.of("loading"), self._meter.between_steps():
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


def _beginning(plan: Plan, world: World, *, one_copy: bool) -> str:
    """The first line about a run."""
    copies = "; one copy of parameters and optimizer state for all replicas" if one_copy else ""
    summed = "; replicas add up on a ring of messages" if plan.on_ring else ""
    return f"plan {plan} on {world.why}{copies}{summed}"

"""A run of an asynchronous plan on processes, which are started and watched here.

    launcher (here)     server 0, 1, ...                    worker 0, 1, ...
    progress         <- updates, who came and went       <- gradients
    evaluation       <- snapshots, as files              -> parameters
    checkpoints

Evaluating and saving are done here, in a thread, while training goes on.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshloom.asynchronous.account import RunAccount
from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.asynchronous.received_reports import ReceivedReports
from meshloom.asynchronous.state.checkpoints import Start
from meshloom.asynchronous.state.due_snapshots import DueSnapshots
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.asynchronous.state.settings import (
    AsynchronousSettings,
    check_foreground,
    refuse_common_steps,
    stopped_and_saved,
)
from meshloom.asynchronous.state.snapshot_evaluation import Inspection
from meshloom.asynchronous.state.snapshots import ASK_FOR_SNAPSHOT
from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.core.errors import CheckpointError, PlanError, TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.failure import EndedError
from meshloom.launch.processes.elastic import ElasticProcesses, RoleCommand
from meshloom.launch.processes.signals import ONE_REQUEST_SECONDS, noted_signals
from meshloom.telemetry.progress import Listener
from meshloom.telemetry.summary import Summary

_WORKERS_GO_SECONDS = 10.0  # after the last update: to finish what nobody needs any more
_SERVERS_GO_SECONDS = 5.0


@dataclass(kw_only=True)
class _Ending:
    """The run was asked to end, at a time: after a checkpoint of this update, or a later one.

    num_signals: those that are one request.
    """

    update: int
    at: float
    num_signals: int = 1


class ProcessRun:
    """A `TrainingRun` with exchange=async, on processes of this machine and those that join them.

    target, words: the job's FILE.py:NAME, which every process loads itself, and its sys.argv after its name.
    """

    def __init__(
        self, job: Job, plan: Plan, settings: AsynchronousSettings, listener: Listener,
        target: str, words: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        if settings.circumstances != Circumstances():
            raise PlanError(
                "Speeds, latencies and incidents are of a virtual clock. Use --devices simulated, or leave them out."
            )
        plan.check_batch(job.batch_size)
        check_foreground(job)
        self._plan, self._settings, self._listener = plan, settings, listener
        module = "meshloom.asynchronous"
        self._program = RoleCommand(
            module=module, target=target, words=words, plan=str(plan), settings=settings.to_json()
        )
        self._replica = WorkerReplica(job, plan, "cpu", settings.dtype)
        self._inspection = Inspection(job, plan, settings, self._replica)
        self._inspection.try_out()
        start = Start.find(settings, job, plan, PushShares(job, plan), self.model)
        for note in (*start.notes(), *self._replica.take_notes()):
            listener.note(note)
        whole = self._replica.whole_model
        self._inspection.load([start.snapshot(whole, number)[1] for number in range(plan.servers)])
        self._account = RunAccount(job, plan, settings.steps)
        self._due = DueSnapshots(self._inspection, settings, job, listener, plan.servers, start.version)
        self._reports = ReceivedReports(plan, self._account, listener, start.version, self._due.add)
        self._ending: _Ending | None = None

    @property
    def next_step(self) -> int:
        """Updates so far."""
        return self._reports.version

    @next_step.setter
    def next_step(self, step: int) -> None:
        self._reports.version = step

    @property
    def model(self) -> torch.nn.Module:
        """With the values of the newest snapshot that was evaluated or saved."""
        return self._replica.model

    def fit(self) -> Summary:
        """Train to the end. Raises `EndedError` at a failure or signal, `TrainingError` without workers."""
        plan, reports = self._plan, self._reports
        with (
            noted_signals() as signals,
            _run_directory(self._settings.out) as directory,
            ElasticProcesses(
                self._program,
                directory,
                self._settings.listen,
                num_servers=plan.servers,
                num_workers=plan.dp,
            ) as processes,
        ):
            self._listener.note(
                f"servers at {', '.join(processes.addresses)}; to join: --join {processes.addresses[0]} --key {processes.worker_key}"
            )
            self._account.began = time.monotonic()
            processes.start()
            self._follow(processes, directory, signals)
            seconds = time.monotonic() - self._account.began
            reports.receive(processes.dismiss(_WORKERS_GO_SECONDS, _SERVERS_GO_SECONDS))
            while self._due.advance(directory):  # their files go with the processes
                self._end_at(signals, directory)
                time.sleep(0.02)
        for line in self._account.lines(seconds, "processes", reports.ages, reports.computing()):
            self._listener.note(line)
        saved = self._due.saved[1] if self._due.saved else None
        summary = self.summary(seconds, self._due.evaluation, saved)
        self._listener.ended(summary)
        return summary

    def batches(self) -> NoReturn:
        """There are none that all workers take together. Raises `PlanError`."""
        refuse_common_steps()

    def step(self, batch: object) -> NoReturn:
        """Nor such steps. Raises `PlanError`."""
        refuse_common_steps()

    def evaluate(self) -> dict[str, float]:
        """Every metric of the job's `Evaluate` over all of its data, with the values that `model` has."""
        return self._inspection.evaluate([], self._due.newest)

    def finish(self) -> None:
        """What is written, is written in `fit`."""

    def save(self, *, wait: bool = True) -> Path:
        """The newest checkpoint, saved while training went on. Raises `CheckpointError` if there is none."""
        if self._due.saved is None:
            raise CheckpointError(
                "Servers hold the state of this run, and no checkpoint of it is due yet. Give --out DIRECTORY: the last update is saved there, and what "
                "Job(checkpoint_every=...) says."
            )
        return self._due.saved[1]

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes of all workers together, and shares of their time."""
        self._reports.add_bytes()
        return self._account.summary(seconds, evaluation, checkpoint, self._reports.time_shares())

    def record(self) -> dict[str, Any]:
        """For a program: updates by age, updates lost, share of its time in which each worker computed,
        messages and connections refused."""
        reports = self._reports
        return {
            "ages": {str(age): count for age, count in sorted(reports.ages.items())},
            "lost": self._account.lost,
            "refused_messages": reports.count("refused"),
            "computing": {str(worker): part for worker, part in reports.computing().items()},
        }

    def close(self) -> None:
        """Remove the model's hooks. Processes end with `fit`."""
        self._replica.close()

    def _follow(self, processes: ElasticProcesses, directory: Path, signals: list[int]) -> None:
        reports = self._reports
        alone = reports.moved = time.monotonic()  # since when no worker is there
        while not reports.finished:
            before = self._account.num_updates
            reports.receive(processes.poll(0.05))
            if self._account.num_updates > before:
                processes.updated()
            for note in processes.take_notes():
                self._listener.note(note)
            self._due.advance(directory)
            self._end_at(signals, directory)
            if reports.present or processes.starting():
                alone = time.monotonic()
            self._check_alive(processes, alone)

    def _end_at(self, signals: Sequence[int], directory: Path) -> None:
        """Ends the run if a signal asks for it: once the newest update is saved, if there is an `out`; at a
        second signal immediately."""
        if not signals:
            return
        name, code = signal.Signals(signals[0]).name, 128 + signals[0]
        if self._settings.out is None or not self._account.num_updates:
            raise EndedError(f"Stopped by {name}; all processes have ended.", code)
        if self._ending is None:
            self._ending = _Ending(update=self.next_step, at=time.monotonic())
            self._due.ending = True
            (directory / ASK_FOR_SNAPSHOT).touch()
        ending = self._ending
        ending.update = min(ending.update, self.next_step)  # updates may be lost meanwhile
        if self._due.saved is not None and self._due.saved[0] >= ending.update:
            raise stopped_and_saved(signals[0], self._due.saved[0], self._settings)
        if time.monotonic() < ending.at + ONE_REQUEST_SECONDS:
            ending.num_signals = len(signals)
        elif len(signals) > ending.num_signals:
            raise EndedError(
                f"Stopped by {name}; all processes have ended, before a checkpoint was saved.", code
            )

    def _check_alive(self, processes: ElasticProcesses, alone: float) -> None:
        """alone: since when no worker is there."""
        timeout = self._settings.timeout_seconds
        if time.monotonic() > alone + timeout:
            ended = ", ".join(processes.ended_workers())
            raise TrainingError(
                f"After update {self.next_step} no worker has been there for {timeout:g} s{ended and f': {ended}'}. "
                "Let workers join sooner, give a longer --timeout, or go on from a checkpoint with --resume."
            )
        if time.monotonic() > self._reports.moved + timeout:
            who = "workers are there, but push nothing"
            if stopped := processes.stopped():
                who = f"{' and '.join(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP)"
            raise TrainingError(
                f"After update {self.next_step} nothing has happened for {timeout:g} s: {who}. Give a longer --timeout if a share "
                "takes that long, or go on from a checkpoint with --resume."
            )


@contextmanager
def _run_directory(out: Path | None) -> Generator[Path]:
    """A private directory of this run, beside its checkpoints if it has any; gone when the run ends."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        prefix = ".servers-" if out is not None else "meshloom-servers-"
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=out)).resolve()
        (directory / "due").mkdir()
    except OSError as error:
        raise CheckpointError(
            f"There is no room for the servers' snapshots in {out or tempfile.gettempdir()}: {error.strerror}."
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)

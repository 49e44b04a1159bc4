"""A run of an asynchronous plan on processes: servers and workers are started and watched, what server 0
tells is shown, snapshots that are due are looked at.

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
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshloom.asynchronous.account import RunAccount
from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.asynchronous.protocol.head import Update
from meshloom.asynchronous.state.checkpoints import Start
from meshloom.asynchronous.state.evaluation_thread import Look
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.asynchronous.state.settings import AsynchronousSettings, inner_plan
from meshloom.asynchronous.state.snapshot_evaluation import Inspection
from meshloom.asynchronous.state.snapshots import due_path
from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.core.errors import CheckpointError, PlanError, TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.failure import EndedError
from meshloom.launch.one_process import world_in_one_process
from meshloom.launch.processes.elastic import ElasticProcesses, RoleCommand
from meshloom.launch.processes.signals import noted_signals
from meshloom.telemetry.progress import Listener
from meshloom.telemetry.summary import Summary, TimeShares

_WORKERS_GO_SECONDS = 10.0  # after the last update: to finish what nobody needs any more
_SERVERS_GO_SECONDS = 5.0


class ProcessRun:
    """A job under a plan with exchange=async, on processes of this machine and those that join them.

    target, words: the job's FILE.py:NAME, which every process loads itself, and its sys.argv after its name.
    `next_step` is the number of updates that are made, `model` what was looked at last.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        settings: AsynchronousSettings,
        listener: Listener,
        target: str,
        words: tuple[str, ...] = (),
    ) -> None:
        if settings.circumstances != Circumstances():
            raise PlanError(
                "Speeds, latencies and incidents are of a virtual clock. Use --devices simulated, or leave them out."
            )
        plan.check_batch(job.batch_size)
        self._job, self._plan, self._settings, self._listener, self._target, self._words = (
            job,
            plan,
            settings,
            listener,
            target,
            words,
        )
        shares = PushShares(job, plan)
        here = world_in_one_process(Plan().mesh, "cpu")
        replica = WorkerReplica(job, plan, here, settings.dtype, inner=Plan())
        self._inspection = Inspection(job, plan, settings, replica)
        self._inspection.try_out()
        start = Start.find(settings, job, plan, shares, replica.model)
        if start.note:
            listener.note(start.note)
        self.next_step = start.version
        self._inspection.load(
            [start.snapshot(replica.whole_model, number)[1] for number in range(plan.servers)]
        )
        self._account = RunAccount(job, plan, settings.steps)
        self._ages: Counter[int] = Counter()
        self._counts: dict[tuple[str, int], dict[str, int]] = {}  # of each start of a server
        self._starts: Counter[str] = Counter()
        self._tallies: dict[int, dict[str, float]] = {}
        self._present: set[int] = set()
        self._noted: set[str] = set()
        self._moved = 0.0  # when anything happened last
        self._finished = False
        self._due: deque[int] = deque()
        self._seen = start.version  # the newest snapshot that was looked at
        self._looking: Look | None = None
        self._evaluation: dict[str, float] = {}
        self._saved: Path | None = None

    @property
    def model(self) -> torch.nn.Module:
        """As it was looked at last."""
        return self._inspection.model

    def fit(self) -> Summary:
        """Train to the last update. Raises `EndedError` when a process fails or a signal comes,
        `TrainingError` when no worker is left."""
        with noted_signals() as signals, _run_directory(self._settings.out) as directory:
            plan = self._plan
            program = RoleCommand(
                module="meshloom.asynchronous",
                target=self._target,
                words=self._words,
                plan=str(plan),
                settings=self._settings.to_json(),
            )
            with ElasticProcesses(
                program,
                directory,
                self._settings.listen,
                num_servers=plan.servers,
                num_workers=plan.dp,
                ranks_per_worker=inner_plan(plan).mesh.size,
            ) as processes:
                self._listener.note(
                    f"servers at {', '.join(processes.addresses)}; to join: --join {processes.addresses[0]} --key {processes.worker_key}"
                )
                self._account.began = time.monotonic()
                processes.start()
                self._follow(processes, directory, signals)
                seconds = time.monotonic() - self._account.began
                self._hear(processes.dismiss(_WORKERS_GO_SECONDS, _SERVERS_GO_SECONDS))
                while self._look(directory):  # what they have written goes with the processes
                    _end_at(signals)
                    time.sleep(0.02)
        computing = {
            worker: tally["computing"] / max(tally["seconds"], 1e-9)
            for worker, tally in self._tallies.items()
        }
        late = self._count("late")
        for line in self._account.lines(seconds, "processes", self._ages, computing, late):
            self._listener.note(line)
        return self._summary(seconds)

    def record(self) -> dict[str, Any]:
        """For a program: updates by age, updates lost, pushes refused, share of its time in which each worker
        computed, messages and connections refused."""
        return {
            "ages": {str(age): count for age, count in sorted(self._ages.items())},
            "lost": self._account.lost,
            "refused": self._count("late"),
            "refused_messages": self._count("refused"),
            "computing": {
                str(worker): tally["computing"] / max(tally["seconds"], 1e-9)
                for worker, tally in sorted(self._tallies.items())
            },
        }

    def _follow(self, processes: ElasticProcesses, directory: Path, signals: list[int]) -> None:
        alone = time.monotonic()  # since when no worker is there
        self._moved = alone
        while not self._finished:
            before = self._account.num_updates
            told = processes.poll(0.05)
            self._hear(told)
            if self._account.num_updates > before:
                processes.moved()
                self._moved = time.monotonic()
            for note in processes.take_notes():
                self._listener.note(note)
            _end_at(signals)
            self._look(directory)
            if self._present or processes.starting():
                alone = time.monotonic()
            elif time.monotonic() > alone + self._settings.timeout_seconds:
                ended = ", ".join(processes.ended_workers())
                raise TrainingError(
                    f"After update {self.next_step} no worker has been there for {self._settings.timeout_seconds:g} s{ended and f': {ended}'}. "
                    "Let workers join sooner, give a longer --timeout, or go on from a checkpoint with --resume."
                )
            if time.monotonic() > self._moved + self._settings.timeout_seconds:
                stopped = processes.stopped()
                who = (
                    f"{' and '.join(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP)"
                    if stopped
                    else "workers are there, but push nothing"
                )
                raise TrainingError(
                    f"After update {self.next_step} nothing has happened for {self._settings.timeout_seconds:g} s: {who}. Give a longer --timeout if a share "
                    "takes that long, or go on from a checkpoint with --resume."
                )

    def _hear(self, told: Sequence[tuple[str, dict[str, Any]]]) -> None:
        for who, event in told:
            match event.pop("event"):
                case "update":
                    rates, memory_bytes = event.pop("rates"), event.pop("memory")
                    self._updated(Update(**event), rates, memory_bytes)
                case "snapshot":
                    self._newest(event["version"])
                case "restored":
                    self._restored(event["version"], event["lost"])
                case "worker":
                    self._worker(event["worker"], event["what"])
                case "tally":
                    self._tallies[event["worker"]] = event
                case "counts":
                    self._counts[who, self._starts[who]] = event
                case "finished":
                    self._finished = True
                    self._ages = Counter({int(age): count for age, count in event["ages"].items()})
                # a server that is started again says it again
                case "note" if event["text"] not in self._noted:
                    self._noted.add(event["text"])
                    self._listener.note(event["text"])
                case "serving":
                    self._moved = time.monotonic()
                    self._starts[who] += 1
                case _:
                    pass

    def _updated(self, update: Update, rates: list[float], memory_bytes: int) -> None:
        self.next_step = update.version
        self._account.updated(update)
        self._listener.step(self._account.progress(update, learning_rates=rates, memory_bytes=memory_bytes))

    def _newest(self, version: int) -> None:
        settings, job = self._settings, self._job
        if version > max([self._seen, *self._due]) and (
            settings.evaluates(job, version) or settings.saves(job, version)
        ):
            self._due.append(version)

    def _restored(self, version: int, lost: int) -> None:
        if self._account.num_updates == 0 and not lost:
            return  # the start
        # server 0 may have been killed before it had written down the newest
        lost = max(lost, self.next_step - version)
        self.next_step = version
        self._listener.note(self._account.restored(version, lost))

    def _worker(self, worker: int, what: str) -> None:
        self._moved = time.monotonic()
        if not self._account.num_updates:
            self._account.began = time.monotonic()  # until now, processes were starting
        (self._present.add if what == "joined" else self._present.discard)(worker)
        if self._finished or (what == "joined" and worker < self._plan.dp):
            return
        said = {
            "joined": "has joined",
            "left": "has left",
            "lost": "is lost: so is its gradient, and its share is given out again",
            "expelled": "has pushed a gradient that is not finite: it was refused, its share is given out again, and the worker is let go",
        }[what]
        self._listener.note(f"after update {self.next_step} worker {worker} {said}")

    # --- Snapshots that are due.

    def _look(self, directory: Path) -> bool:
        """Take up the next snapshot that is due if none is being looked at, and tell what came of the last;
        whether there is something left."""
        if self._looking is not None and not self._looking.is_alive():
            look, self._looking = self._looking, None
            look.join()
            if look.error is not None:
                raise look.error
            if look.evaluation is not None:
                self._evaluation = look.evaluation
                self._listener.evaluated(look.version, look.evaluation)
            if look.saved is not None:
                self._saved = look.saved
                self._listener.saved(look.version, look.saved)
        if self._looking is None and self._due:
            self._seen = self._due.popleft()
            paths = [due_path(directory, self._seen, server) for server in range(self._plan.servers)]
            self._looking = Look(self._inspection, self._settings, self._job, self._seen, paths)
            self._looking.start()
        return self._looking is not None

    # --- What it came to.

    def _count(self, name: str) -> int:
        return sum(counts[name] for counts in self._counts.values())

    def _summary(self, seconds: float) -> Summary:
        there = max(sum(tally["seconds"] for tally in self._tallies.values()), 1e-9)
        compute, data = (
            sum(tally[name] for tally in self._tallies.values()) / there for name in ("computing", "reading")
        )
        rest = max(0.0, 1 - compute - data)
        bounded = (
            self._plan.staleness is not None
        )  # then what is not spent with servers is spent waiting for slower workers, and cannot be told apart
        newest = {who: self._counts[who, start] for who, start in sorted(self._counts)}
        self._account.push_bytes, self._account.pull_bytes = (
            sum(counts[f"{what}_once"] for counts in newest.values()) for what in ("push", "pull")
        )
        self._account.bytes.update(push=self._count("push"), pull=self._count("pull"))
        shares = TimeShares(
            compute=compute,
            communication=0.0 if bounded else rest,
            waiting=rest if bounded else 0.0,
            data=data,
        )
        return self._account.summary(seconds, self._evaluation, self._saved, shares)


def _end_at(signals: Sequence[int]) -> None:
    if signals:
        raise EndedError(
            f"Stopped by {signal.Signals(signals[0]).name}; all processes have ended.", 128 + signals[0]
        )


@contextmanager
def _run_directory(out: Path | None) -> Generator[Path]:
    """A directory of this run alone, that only its user can read, beside its checkpoints if it has any; gone
    when the run ends."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        directory = Path(
            tempfile.mkdtemp(prefix=".servers-" if out is not None else "meshloom-servers-", dir=out)
        ).resolve()
        (directory / "due").mkdir()
    except OSError as error:
        raise CheckpointError(
            f"There is no room for the servers' snapshots in {out or tempfile.gettempdir()}: {error.strerror}."
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)

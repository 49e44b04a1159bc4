"""What trains a job under a plan: the arguments, the world that it opens, and one run in it, synchronous or
asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.asynchronous.run import AsynchronousRun
from meshloom.asynchronous.state.settings import DEFAULT_SNAPSHOT_EVERY, AsynchronousSettings
from meshloom.core.errors import PlanError, TrainingError
from meshloom.core.exchange_refusals import check_exchange
from meshloom.core.job import Job
from meshloom.core.moments.bfloat16_products import emulation_note
from meshloom.core.plan import Plan
from meshloom.data.shares import Record, Shares
from meshloom.launch.environment import launched_plan
from meshloom.launch.one_at_a_time import working_alone
from meshloom.launch.opening import open_world
from meshloom.launch.world import World
from meshloom.replica.replica import Replica
from meshloom.replica.step_checks import SharedWriteError
from meshloom.telemetry.metrics_file import metrics_listener
from meshloom.telemetry.progress import Listener, all_of
from meshloom.telemetry.summary import Summary
from meshloom.telemetry.timings import Timings
from meshloom.train.checked_arguments import check_arguments
from meshloom.train.contract import Batch, TrainingRun
from meshloom.train.log.run_start import WhereItRuns
from meshloom.train.log.training_log import TrainingLog
from meshloom.train.synchronous import SynchronousRun

T = TypeVar("T")


class Trainer:
    """Trains a job under a plan, by `fit()` or in a loop of one's own:

        with Trainer(job, "dp=4") as trainer:
            for batch in trainer.batches():
                loss = trainer.step(batch)

    Started by `meshloom train` or torchrun this process is one rank; otherwise all ranks are simulated in it.

    plan: a `Plan` or its text; None: the plan given on the command line, or dp=1.
    devices: auto, cuda, cpu, simulated, or simulated:cuda (all replicas in this process, on its GPUs).
    steps: the whole run's number of steps, instead of the job's.
    out: directory for checkpoints and metrics.csv; None writes none. resume: a checkpoint, or a directory that holds some.
    overwrite: begin anew although `out` holds an earlier run's checkpoints; they go once this run has saved
        its first.
    timeout_seconds: how long to wait for another rank. transport: what processes on CPUs talk through: auto,
        or gloo.
    dtype: of parameters and floating-point data, for verification. listener: what is called at the run's events, one or
    several of them.
    share: whether the replicas of a host may have one copy of parameters and optimizer state, on CPUs that
        talk through shared memory. Only the optimizer may change parameters then: what a loop of one's own
        does to them in place would be done by each replica to the one copy, and is an error where it is seen.
        `meshloom train` shares.
    circumstances, snapshot_every: with exchange=async, what happens on the virtual clock, and updates between
        the servers' snapshots (100). Such a run has no loop of one's own: `fit()` goes through it, and
        `asynchronous` has its model and its ages.
    recorded_shares: with shares=measured, the shares of an earlier run (its `shares.record`) instead of
    measurements: the same chunks once more. oversubscribe: whether simulated ranks may be more than make
        sense. overcommit: run although memory is predicted not to suffice (docs/memory.md).
    cache: directory in which readings of losses and choices are kept for later starts of the same job; auto:
    the user's cache; off: none. timings: what the start takes, and what the steps take, as this process's first rank sees it, is added
    to them.

    Trainers of several threads take turns, from step to step, because all threads of a process draw from the
    same generators.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | str | None = None,
        *,
        devices: str = "auto",
        steps: int | None = None,
        out: str | Path | None = None,
        resume: str | Path | None = None,
        overwrite: bool = False,
        timeout_seconds: float = 600.0,
        transport: str = "auto",
        dtype: torch.dtype | None = None,
        share: bool = False,
        listener: Listener | Sequence[Listener] | None = None,
        circumstances: Circumstances | None = None,
        snapshot_every: int | None = None,
        recorded_shares: Record = (),
        oversubscribe: bool = False,
        overcommit: bool = False,
        cache: str | Path = "auto",
        timings: Timings | None = None,
    ) -> None:
        self.timings = timings or Timings()
        check_arguments(
            job, listener, circumstances, {"steps": steps, "snapshot_every": snapshot_every}, {"out": out, "resume": resume, "cache": cache},
            {"overwrite": overwrite, "share": share, "oversubscribe": oversubscribe, "overcommit": overcommit}, {"devices": devices, "transport": transport}, dtype,
        )  # fmt: skip
        self.job, self.plan = job, _plan(plan)
        self.plan.check_batch(job.batch_size)
        if job.evaluate:
            check_exchange(job, self.plan)
        self.steps = steps if steps is not None else job.steps
        self.out = Path(out) if out is not None else None
        self.listener = _one_listener(listener)
        if self.out is not None:
            self.listener = all_of([self.listener, metrics_listener(self.out, self.listener.note)])
        if circumstances is not None and self.plan.synchronous:
            raise PlanError(
                f"circumstances are of a virtual clock, which only exchange=async has, and the plan is {self.plan}. Leave them out."
            )
        if snapshot_every is not None and self.plan.synchronous:
            raise PlanError(
                f"snapshot_every={snapshot_every} is for the servers of exchange=async, and the plan is {self.plan}. Leave it out."
            )
        self.shares, self._closed = Shares(self.plan, recorded_shares), False
        earlier = Path(resume) if resume is not None else None
        with working_alone(), ExitStack() as building:
            with self.timings.of("joining"):
                self.world: World = building.enter_context(
                    open_world(
                        self.plan.mesh, devices, timeout_seconds, transport, ring=self.plan.on_ring, oversubscribe=oversubscribe,
                        saving=job.checkpoint == "background",
                    )
                )  # fmt: skip
            for context in self.world.local:
                context.activity.enter("setting up", 0)
            log: TrainingLog | None = None
            if self.out is not None and self.world.main:
                log = building.enter_context(TrainingLog(self.out, goes_on=earlier is not None))
                self.listener = log.beside(self.listener)
            _tell_of_emulation(self.plan, self.world, self.listener)
            if not self.plan.synchronous:
                settings = AsynchronousSettings(
                    steps=self.steps, out=self.out, resume=earlier, overwrite=overwrite, dtype=dtype,
                    snapshot_every=snapshot_every if snapshot_every is not None else DEFAULT_SNAPSHOT_EVERY, circumstances=circumstances or Circumstances(),
                )  # fmt: skip
                self._run: TrainingRun = AsynchronousRun(job, self.plan, self.world, settings, self.listener)
            else:
                self._opened = partial(
                    SynchronousRun, job, self.plan, self.world, shares=self.shares, timings=self.timings, steps=self.steps, out=self.out,
                    resume=earlier, overwrite=overwrite, dtype=dtype, cache=str(cache), overcommit=overcommit, leave=self.close,
                    times_steps=timings is not None,
                )  # fmt: skip
                self._run = self._opened(listener=self.listener, share=share)
            building.callback(self._run.close)
            if log:
                log.start(job, self.plan, WhereItRuns(self.world.kind, self.world.why), self.replicas, steps=self.steps, step=self.next_step)  # fmt: skip
            self._stack = building.pop_all()

    @property
    def next_step(self) -> int:
        """Steps done, or updates made, counted over the whole run."""
        return self._run.next_step

    @property
    def replicas(self) -> list[Replica]:
        """Those of this process; none with exchange=async."""
        return self._run.replicas.all if isinstance(self._run, SynchronousRun) else []

    @property
    def synchronous(self) -> SynchronousRun | None:
        """The run, with any other exchange."""
        return self._run if isinstance(self._run, SynchronousRun) else None

    @property
    def asynchronous(self) -> AsynchronousRun | None:
        """The run, with exchange=async."""
        return self._run if isinstance(self._run, AsynchronousRun) else None

    def batches(self) -> Iterator[Batch]:
        """This process's share of every global batch that is left, in order.

        After SIGTERM or Ctrl-C a run with `out` finishes its step, saves instead of giving another batch, and
        raises `SystemExit`.
        """
        self._check_open("batches()")
        yield from self._run.batches()

    def step(self, batch: Batch) -> float:
        """Train on a batch that `batches()` gave; the mean loss of the whole global batch, of several the first."""
        self._check_open("step()")
        if self.synchronous:
            self.synchronous.data.check(batch, self.next_step)
        return self._run.step(batch)

    def evaluate(self) -> dict[str, float]:
        """Every metric of the job's `Evaluate`, averaged over all of its data; steps schedulers that go by one."""
        self._check_open("evaluate()")
        return self._run.evaluate()

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the state after the newest step into `out`; its path.

        wait: False with Job(checkpoint="background"): only until the state is copied. The checkpoint becomes
            whole later: at the next `save()` or `close()` at the latest, or `step()`, `save()` raises why not.
        """
        self._check_open("save()")
        return self._run.save(wait=wait)

    def fit(self) -> Summary:
        """Train to the last step, evaluating and saving when due."""
        self._check_open("fit()")
        with suppress(SharedWriteError):
            return self._run.fit()
        self._run.close()
        own = "Forwards write parameters, so every replica gets a copy of its own"
        listener = replace(self.listener, started=lambda line: self.listener.note(f"{own}: {line}"))
        self._run = self._opened(listener=listener, share=False)
        self._stack.callback(self._run.close)
        return self._run.fit()

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes and seconds of the steps taken so far, of this process's first rank."""
        return self._run.summary(seconds, evaluation, checkpoint)

    def together(self, function: Callable[[Replica], T]) -> list[T]:
        """What it returns for each replica of this process, simulated ones in turns; errors say which rank, doing what."""
        return self._run.replicas.together(function) if isinstance(self._run, SynchronousRun) else []

    def close(self) -> None:
        """Wait for a checkpoint that is being written; end reader processes, leave groups, remove hooks."""
        self._closed = True
        with self._stack:
            self._run.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._closed = True
            self._stack.__exit__(kind, error, where)  # after an error the other ranks are not waited for

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise TrainingError(
                f"This Trainer is closed, so {call} cannot run any more. Call it inside of `with ml.Trainer(...) as trainer:`."
            )


def _one_listener(given: Listener | Sequence[Listener] | None) -> Listener:
    if given is None:
        return Listener()
    return given if isinstance(given, Listener) else all_of(given)


def _plan(plan: Plan | str | None) -> Plan:
    given = launched_plan()
    if plan is None:
        return Plan.parse(given) if given else Plan()
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    if not isinstance(chosen, Plan):
        raise PlanError(f"Trainer takes a Plan or its text, not a {type(plan).__name__}.")
    # verification keys the draws of any plan
    if given and replace(Plan.parse(given), keyed_draws=chosen.keyed_draws) != chosen:
        raise PlanError(
            f"The program's own plan is {chosen} and the command line says --plan {given}. Leave one of them out, or make them equal."
        )
    return chosen


def _tell_of_emulation(plan: Plan, world: World, listener: Listener) -> None:
    """Before what would be slow."""
    if plan.precision == "float32":
        return
    note = emulation_note(plan.precision, [each.device for each in world.local])
    if note and world.main:
        listener.note(note)

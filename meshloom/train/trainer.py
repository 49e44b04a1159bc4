"""The training loop, over parts that were built before it: devices, replicas, readers, checkpoints."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.asynchronous.run import AsynchronousRun
from meshloom.asynchronous.state.settings import DEFAULT_SNAPSHOT_EVERY, Settings
from meshloom.checkpoint.checkpoint import Checkpoint, passed_over
from meshloom.checkpoint.run_directory import open_directory
from meshloom.checkpoint.saving import save
from meshloom.comm.liveness.activity import Phase
from meshloom.comm.objects import agree, collect
from meshloom.comm.recording import Count
from meshloom.comm.seat import Seat
from meshloom.comm.steps import Steps, advance_one, run_in_steps
from meshloom.core.cache import Cache
from meshloom.core.errors import CheckpointError, JobError, MeshloomError, PeerLostError, PlanError, TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.core.timings import Timings
from meshloom.core.units import how_many
from meshloom.data.data import Chunk, Reader, build_dataset, evaluation_chunks, open_reader
from meshloom.data.measured_shares import remeasure
from meshloom.data.proportion import EVERY_STEPS
from meshloom.data.shares import Record, Shares
from meshloom.data.team_data import open_team_reader
from meshloom.launch.environment import cache_directory, launched_plan
from meshloom.launch.events import tell
from meshloom.launch.failure import report_stop
from meshloom.launch.opening import open_world
from meshloom.launch.processes.signals import StopRequests
from meshloom.launch.world import World
from meshloom.parameters.model import check_dense_buffers
from meshloom.pipeline.runtime.gather_timeline import gather_timeline
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.program.store.stored import Stored
from meshloom.program.trace.precision import default_precision
from meshloom.replica.replica import Replica, StepResult
from meshloom.replica.trial_evaluation import untouched
from meshloom.telemetry.progress import Listener, Progress
from meshloom.telemetry.summary import Summary, Traffic, time_shares
from meshloom.telemetry.timeline import Timeline
from meshloom.telemetry.timeline_files import Recording, is_kept, write_recording
from meshloom.train.checked_arguments import check_arguments
from meshloom.train.idle_ranks import idle_lines
from meshloom.train.one_at_a_time import working_alone

T = TypeVar("T")
CHECK_EVERY = 100  # steps between comparisons of the replicas' bits


@dataclass(frozen=True)
class Batch:
    """This process's share of one global batch: the chunks of each replica that lives here (of all, when simulated)."""

    step: int
    shares: list[list[Chunk]]

    @property
    def chunks(self) -> list[Chunk]:
        """All of them, in order."""
        return [chunk for share in self.shares for chunk in share]


@dataclass
class _Clock:
    """Seconds spent, and when the clocks of all ranks started together."""

    start: float = field(default_factory=time.monotonic)
    data: float = 0.0
    steps: float = 0.0
    held_up: float = 0.0  # part of `steps`: in collectives
    num_steps: int = 0


class Trainer:
    """Trains a job under a plan, by `fit()` or in a loop of one's own:

        with Trainer(job, "dp=4") as trainer:
            for batch in trainer.batches():
                loss = trainer.step(batch)

    Started by `meshloom train` or torchrun this process is one rank; otherwise all ranks are simulated in it.

    plan: a `Plan` or its text; None: the plan given on the command line, or dp=1.
    devices: auto, cuda, cpu, simulated, or simulated:cuda (all replicas in this process, spread over its GPUs).
    steps: the whole run's number of steps, instead of the job's.
    out: directory for checkpoints; None writes none. resume: a checkpoint, or a directory that holds some.
    overwrite: begin anew although `out` holds an earlier run's checkpoints; they go once this run has saved its first.
    timeout_seconds: how long to wait for another rank. transport: what processes on CPUs talk through: auto, or gloo.
    dtype: of parameters and floating-point data, for verification.
    share: whether the replicas of a host may have one copy of parameters and optimizer state, on CPUs that talk through shared memory. Only the
        optimizer may change parameters then: what a loop of one's own does to them in place would be done by each replica to the one copy, and
        is an error where it is seen. `meshloom train` shares.
    circumstances, snapshot_every: with exchange=async, what happens on the virtual clock, and updates between the servers' snapshots (100). Such a run
        has no loop of one's own: `fit()` goes through it, and `asynchronous` has its model and its ages.
    recorded_shares: with shares=measured, the shares of an earlier run (its `shares.record`) instead of measurements: the same chunks once more.
    oversubscribe: whether simulated ranks may be more than make sense.
    cache: directory in which readings of losses and choices are kept for later starts of the same job; auto: the user's cache; off: none.
    timings: what the start takes, as this process's first rank sees it, is added to them.

    Trainers of several threads take turns, from step to step, because all threads of a process draw from the same generators.
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
        listener: Listener | None = None,
        circumstances: Circumstances | None = None,
        snapshot_every: int | None = None,
        recorded_shares: Record = (),
        oversubscribe: bool = False,
        cache: str | Path = "auto",
        timings: Timings | None = None,
    ) -> None:
        self.timings = timings or Timings()
        check_arguments(
            job, listener, circumstances, {"steps": steps, "snapshot_every": snapshot_every}, {"out": out, "resume": resume, "cache": cache},
            {"overwrite": overwrite, "share": share, "oversubscribe": oversubscribe}, {"devices": devices, "transport": transport}, dtype,
        )  # fmt: skip
        self.job = job
        self.plan = _plan(plan)
        self.plan.check_batch(job.batch_size)
        self.steps = steps if steps is not None else job.steps
        self.out = Path(out) if out is not None else None
        self.next_step = 0
        self._dtype = dtype
        self.listener = listener or Listener()
        self.replicas: list[Replica] = []
        self.asynchronous: AsynchronousRun | None = None
        if circumstances is not None and self.plan.exchange != "async":
            raise PlanError(f"circumstances are of a virtual clock, which only exchange=async has, and the plan is {self.plan}. Leave them out.")
        if snapshot_every is not None and self.plan.exchange != "async":
            raise PlanError(f"snapshot_every={snapshot_every} is for the servers of exchange=async, and the plan is {self.plan}. Leave it out.")
        self.shares = Shares(self.plan, recorded_shares)
        self._stack = ExitStack()
        self._readers: list[Reader] = []
        self._evaluation_data: Any = None
        self._results: list[StepResult] = []
        self._first_loss = math.nan
        self._timelines: list[Timeline] = []
        self._replaced: list[Path] = []  # an earlier run's checkpoints, until this run has its own
        self._tried = False  # whether evaluation was
        self._saved: tuple[int, Path] | None = None  # the newest checkpoint of this run, and its step
        self._stop_requests = StopRequests()
        self._stopping = False  # whether all ranks know that some of them was asked to stop
        self._closed = False
        with working_alone(), self._stack as building:
            with self.timings.of("joining"):
                self.world: World = building.enter_context(
                    open_world(self.plan.mesh, devices, timeout_seconds, transport, self.plan.algorithm, oversubscribe=oversubscribe)
                )
            self._enter("setting up")
            if self.plan.exchange == "async":
                settings = Settings(
                    steps=self.steps, out=self.out, resume=Path(resume) if resume is not None else None, overwrite=overwrite, dtype=dtype,
                    snapshot_every=snapshot_every if snapshot_every is not None else DEFAULT_SNAPSHOT_EVERY, circumstances=circumstances or Circumstances(),
                )  # fmt: skip
                self.asynchronous = AsynchronousRun(job, self.plan, self.world, settings, self.listener)
                building.callback(self.asynchronous.close)
                self.next_step = self.asynchronous.next_step
                self._tell(lambda: self.listener.started(f"plan {self.plan} on {self.world.why}, on a virtual clock"))
                self._stack = building.pop_all()
                return
            building.callback(self._stop_requests.close)
            warnings: list[str] = []
            for seat in self.world.local:
                of_first = self.timings if seat is self.world.local[0] else None
                stored = self._stored(cache) if seat.rank == 0 else None
                warnings = stored.warnings if stored else warnings
                self.replicas.append(Replica(job, self.plan, seat, dtype=dtype, share=share, timings=of_first, stored=stored))
            for replica in self.replicas:
                building.callback(replica.close)
                replica.stop_requests = self._stop_requests.received if self.out else None
            self._check_separate()
            home = Path(resume) if resume is not None else None
            self._replaced = self.together(lambda replica: open_directory(self.out, replica.seat.world, resume=home, overwrite=overwrite))[0]
            self.together(lambda replica: replica.prepare())
            if self.out:
                check_dense_buffers(self.replicas[0].model, "checkpoints hold only dense buffers")
            self._open_shares(recorded_shares)
            if home is not None:
                self._resume(home)
            self._start_step = self._checked = self.next_step
            self._checks = self._evaluations = 0
            self._clock = _Clock()
            copies = "; one copy of parameters and optimizer state for all replicas" if self.replicas[0].exchange.one_copy else ""
            summed = f"; replicas add up by {self.plan.algorithm}, on messages" if self.plan.algorithm else ""
            self._tell(lambda: self.listener.started(f"plan {self.plan} on {self.world.why}{copies}{summed}"))
            for note in [*self.replicas[0].notes(), *self._idle(), *warnings]:
                self._tell(lambda: self.listener.note(note))  # noqa: B023  (called at once)
            self._enter("between steps")
            self._stack = building.pop_all()

    def _stored(self, cache: str | Path) -> Stored | None:
        """For the rank that reads; in another precision than the job's own every reading is new."""
        directory = cache_directory(str(cache)) if self._dtype is None else None
        return Stored(Cache(directory), self.timings) if directory is not None else None

    def batches(self) -> Iterator[Batch]:
        """This process's share of every global batch that is left, in order.

        After SIGTERM or Ctrl-C a run with `out` finishes its step, saves instead of giving another batch, and raises `SystemExit`.
        """
        self._refuse_loop("batches()")
        if self.job.evaluate and not self._tried and self.next_step < self.steps:
            self._try_evaluation()
        try:
            if self.out:
                self._stop_requests.open()
            self._enter("reading")
            with self.timings.of("data"):
                self._readers = self.together(self._open_reader)
            while self.next_step < self.steps:
                if self._stopping or (self._stop_requests.received and len(self.replicas) == self.plan.mesh.size):
                    self._stop(self.out)
                batch = self._read()
                yield batch
                if self.next_step == batch.step and not self._closed:
                    raise TrainingError(
                        f"The batch of step {batch.step + 1} was not trained, and the next one was asked for. Give each to Trainer.step() before that."
                    )
        finally:
            self._stop_requests.close()
            self._close_readers()

    def step(self, batch: Batch) -> float:
        """Train on a batch that `batches()` gave; the mean loss of the whole global batch."""
        self._refuse_loop("step()")
        self._check_batch(batch)
        if self.out and not self._stop_requests.armed:
            self._stop_requests.arm()
            tell({"event": "saves"}) if self._stop_requests.armed else None
        started, held_up = time.monotonic(), self._held_up()
        recorded = self.plan.pp > 1 and self.out is not None and is_kept(batch.step + 1, self._start_step, self.steps)
        for replica in self.replicas:
            replica.recorder = Recorder(replica.seat.device) if recorded else None
        with self.timings.of("steps" if self._clock.num_steps else "first step"), self._computing():
            self._results = self.together(lambda replica: replica.step(batch.step, batch.shares[self.replicas.index(replica)]))
        self.next_step = batch.step + 1
        self._stopping = self._results[0].stopping
        self._enter("comparing")
        with self.timings.of("comparing ranks"):
            if self.next_step == self.steps:
                self.together(lambda replica: replica.settle())
            self._compare(batch.step)
            if self._measures and self.next_step % EVERY_STEPS == 0:
                self._remeasure()
            if self.plan.mesh.size > self.plan.dp and (self.next_step % CHECK_EVERY == 0 or self.next_step == self.steps):
                self.together(lambda replica: replica.check_team(batch.step))
        self._enter("between steps")
        self._clock.steps += time.monotonic() - started
        self._clock.held_up += self._held_up() - held_up
        self._clock.num_steps += 1
        if recorded:
            self._keep_timeline(batch.step + 1)
        result = self._results[0]
        if self._clock.num_steps == 1:
            self._first_loss = result.loss
        if self._clock.num_steps == 1 or self.next_step % CHECK_EVERY == 0 or self.next_step == self.steps or self.plan.mesh.size == self.plan.dp:
            for note in self.together(lambda replica: replica.take_notes())[0]:
                self._tell(lambda: self.listener.note(note))  # noqa: B023  (called at once)
        if self.next_step == self.steps and (told := self.replicas[0].readings):
            self._tell(lambda: self.listener.note(told))
        return result.loss

    def _compare(self, step: int) -> None:
        """Compare the replicas' bits, if that is due and they should be the same."""
        due = self.next_step // CHECK_EVERY > self._checked // CHECK_EVERY or self.next_step == self.steps
        if self.plan.dp > 1 and due and self.replicas[0].exchange.settled:
            self.together(lambda replica: replica.check_identical(step))
            self._checks += 1
            self._checked = self.next_step

    def _open_shares(self, recorded: Record) -> None:
        """Whether shares are measured here; all ranks have the same ones."""
        self._measures = self.plan.shares == "measured" and not recorded and self.world.kind != "simulated"
        if self.plan.shares != "measured":
            return
        self.together(lambda replica: agree(replica.seat.world, {"recorded_shares": self.shares.record}))
        if self._measures and self.job.batch_size < self.plan.dp:
            raise PlanError(
                f"A batch of {how_many(self.job.batch_size, 'sample')} leaves some of dp={self.plan.dp} replicas without any, so their speed "
                f"cannot be measured. Use dp={self.job.batch_size} or less, or a plan without shares=measured."
            )
        if not self._measures and not recorded:
            self._tell(lambda: self.listener.note("shares=measured: simulated ranks have no speeds of their own, so shares stay as they are."))

    def _remeasure(self) -> None:
        """Change the shares of later steps if that pays."""

        def decide(replica: Replica) -> Steps[str]:
            assert replica.pace
            return remeasure(replica.seat, replica.pace, self.shares, self.job.batch_size, self.steps)

        note = self.together(decide)[0]
        if note:
            self._tell(lambda: self.listener.note(note))

    def evaluate(self) -> dict[str, float]:
        """Every metric of the job's `Evaluate`, averaged over all of its data."""
        self._check_open("evaluate()")
        if self.asynchronous:
            return self.asynchronous.evaluate()
        if self.job.evaluate is None:
            raise JobError("This job has nothing to evaluate. Give it evaluate=Evaluate(data, metrics, every).")
        return self._evaluate(self.job.evaluate)

    def _evaluate(self, what: Evaluate, num_batches: int | None = None) -> dict[str, float]:
        self._enter("evaluating")
        if self._evaluation_data is None:
            self._evaluation_data = build_dataset(what.data, self.job.seed)
        data, shares = self._evaluation_data, self.shares.of(max(self.next_step - 1, 0))
        chunks = [evaluation_chunks(data, self.job, self.plan, replica.seat.readers, shares, num_batches) for replica in self.replicas]
        self._evaluations += 1
        with self._computing():
            values = self.together(lambda replica: replica.evaluate(chunks[self.replicas.index(replica)]))[0]
        self._enter("between steps")
        return values

    def _try_evaluation(self) -> None:
        """One batch with all metrics, so that what is wrong with them is known before the first step."""
        assert self.job.evaluate
        self._tried = True
        with ExitStack() as around:
            for replica in self.replicas:
                around.enter_context(untouched(replica.model))
            self._evaluate(self.job.evaluate, num_batches=1)

    def save(self) -> Path:
        """Write a checkpoint of the state after the newest step into `out`; its path."""
        self._check_open("save()")
        if self.asynchronous:
            return self.asynchronous.save()
        if self.out is None:
            raise CheckpointError("There is nowhere to save to. Give Trainer(out=DIRECTORY), or --out DIRECTORY.")
        out = self.out
        self._enter("saving")

        def write(replica: Replica) -> Steps[Path]:
            pieces, streams, values = yield from replica.optimizer_state()
            path = yield from save(
                out,
                self.next_step,
                weights=replica.weights(),
                pieces=pieces,
                streams=streams,
                values={"updater": values, "seed": self.job.seed, "batch_size": self.job.batch_size, "shares": self.shares.record},
                fingerprint=replica.shards.fingerprint(replica.model),
                plan_text=str(self.plan),
                group=replica.seat.world,
                keep=self.job.keep_checkpoints,
                replaced=self._replaced,
            )
            return path

        with self.timings.of("saving"):
            path = self.together(write)[0]
        self._replaced = []
        self._saved = self.next_step, path
        self._enter("between steps")
        return path

    def _stop(self, out: Path | None) -> NoReturn:
        """End as asked to: with a checkpoint, a sentence, and the exit code of the signal."""
        number = self._stop_requests.received[0] if self._stop_requests.received else signal.SIGTERM
        if self._saved is None or self._saved[0] != self.next_step:
            path = self.save()
            self._tell(lambda: self.listener.saved(self.next_step, path))
        why = f"by {signal.Signals(number).name}" if self._stop_requests.received else "because another rank was asked to"
        text = f"Stopped {why} after step {self.next_step} of {self.steps}, which is saved. Go on with --resume {out}."
        main = self.world.main
        self.close()  # while all ranks are here
        report_stop(text, 128 + number, main=main)
        raise SystemExit(128 + number)

    def fit(self) -> Summary:
        """Train to the last step, evaluating and saving when due."""
        self._check_open("fit()")
        if self.asynchronous:
            with working_alone():
                summary = self.asynchronous.fit()
            self.next_step = self.asynchronous.next_step
            return summary
        evaluation: dict[str, float] = {}
        saved: Path | None = None
        began = time.monotonic()
        for batch in self.batches():
            loss = self.step(batch)
            self._tell(lambda: self.listener.step(self._progress(loss)))  # noqa: B023  (called at once)
            last = self.next_step == self.steps
            if self.job.evaluate and (last or self.next_step % self.job.evaluate.every == 0):
                evaluation = self.evaluate()
                self._tell(lambda: self.listener.evaluated(self.next_step, evaluation))  # noqa: B023
            if self.out and (last or (self.job.checkpoint_every and self.next_step % self.job.checkpoint_every == 0)):
                path = saved = self.save()
                self._tell(lambda: self.listener.saved(self.next_step, path))  # noqa: B023
        return self.summary(time.monotonic() - began, evaluation, saved)

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes and seconds of the steps taken so far, of this process's first rank."""
        replica, clock = self.replicas[0], self._clock
        counted = Traffic.of({"dp": self._counts()} | {axis: replica.seat.groups[axis].counts for axis in self._axes_within})
        arrivals = self.together(lambda each: collect(each.seat.world, [at - self._clock.start for at in each.arrivals]))[0]
        return Summary(
            steps=self._clock.num_steps,
            seconds=seconds,
            first_loss=self._first_loss,
            last_loss=self._results[0].loss if self._results else math.nan,
            evaluation=evaluation,
            predicted=self._predict(counted),
            counted=counted,
            shares=time_shares(clock.steps + clock.data, clock.data, clock.held_up, arrivals, replica.seat.rank, clock.num_steps),
            checkpoint=checkpoint,
        )

    def _keep_timeline(self, step: int) -> None:
        """Add the step's timeline to those in `out`. step: counted from 1."""

        def gather(replica: Replica) -> Steps[Timeline]:
            schedule = replica.engine.schedule(self.plan.microbatches)
            assert replica.recorder and schedule
            return gather_timeline(replica.seat.world, replica.recorder.take(), step=step, place=replica.seat.place, schedule=schedule)

        self._timelines.append(self.together(gather)[0])
        if self.world.main and self.out is not None:
            write_recording(self.out, Recording(plan=str(self.plan), timelines=tuple(self._timelines)))

    def _counts(self) -> dict[str, Count]:
        """What this process's first rank handed to collectives along dp, by kind."""
        replica = self.replicas[0]
        counts = dict(replica.replicas.counts)
        for name, count in replica.seat.statistics.counts.items():
            counts[name] = counts[name] + count if name in counts else count
        return counts

    def _held_up(self) -> float:
        within = [count for axis in self._axes_within for count in self.replicas[0].seat.groups[axis].counts.values()]
        return sum(count.seconds for count in (*self._counts().values(), *within))

    @property
    def _axes_within(self) -> list[Axis]:
        """The axes along which a replica is divided."""
        return [axis for axis in ("pp", "tp") if getattr(self.plan, axis) > 1]

    def close(self) -> None:
        """End reader processes, leave the groups, take the hooks off the models."""
        self._closed = True
        self._close_readers()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._closed = True
        self._close_readers()
        self._stack.__exit__(kind, error, where)  # after an error the other ranks are not waited for

    def together(self, steps: Callable[[Replica], Steps[T]]) -> list[T]:
        """Run one generator per local replica in lockstep, and return their results; errors say which rank, and what it was doing."""
        try:
            with working_alone():
                return self._in_lockstep(steps)
        except PeerLostError as error:
            raise PeerLostError(f"{error} It was {self.world.local[0].activity.now()}.") from error

    @contextmanager
    def _computing(self) -> Generator[None]:
        """Around forwards in a precision that is not the job's own: what they draw and make without naming a dtype is of it, as in programs."""
        with working_alone(), default_precision(self._dtype):
            yield

    def _in_lockstep(self, steps: Callable[[Replica], Steps[T]]) -> list[T]:
        turns = self.world.turns
        if len(self.replicas) == 1:
            return run_in_steps([steps(self.replicas[0])])
        ranks = [_naming(steps(replica), replica.seat) for replica in self.replicas]
        if self.plan.reads:  # programs talk in forward and backward, and when they are read, and not all ranks alike
            return turns.run_steps(ranks)
        # Synchronised batch statistics wait inside forward, so simulated ranks must be able to hand over there.
        in_turns = self.plan.sync_batch_norm
        return run_in_steps(ranks, (lambda each: turns.run([partial(advance_one, rank) for rank in each])) if in_turns else None)

    def _read(self) -> Batch:
        started = time.monotonic()
        self._enter("reading")
        with self.timings.of("data"):
            shares = self.together(lambda replica: self._readers[self.replicas.index(replica)].read(self.next_step))
        self._enter("between steps")
        self._clock.data += time.monotonic() - started
        return Batch(self.next_step, shares)

    def _open_reader(self, replica: Replica) -> Steps[Reader]:
        seat = replica.seat
        if seat.team is None:
            return open_reader(self.job, self.plan, seat.readers, self.next_step, self.steps, self.shares)
        return open_team_reader(self.job, self.plan, seat.readers, seat.team, self.next_step, self.steps, self.shares)

    def _close_readers(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []

    def _idle(self) -> list[str]:
        """What of the plan has nothing to do."""
        replica = self.replicas[0]
        division = replica.engine.division
        divided = sum(not each.is_whole for each in division.first.parameters.values()) if division else None
        homes = replica.engine.holders
        return idle_lines(self.plan, self.job.batch_size, [name for name, _ in replica.model.named_parameters()], homes=homes, divided=divided)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise TrainingError(f"This Trainer is closed, so {call} cannot run any more. Call it inside of `with ml.Trainer(...) as trainer:`.")

    def _check_batch(self, batch: Batch) -> None:
        loop = "for batch in trainer.batches(): loss = trainer.step(batch)"
        if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise JobError(f"Trainer.step takes a batch that Trainer.batches() gave, not a {type(batch).__name__}. Write: {loop}.")
        if len(batch.shares) != len(self.replicas):
            raise JobError(f"This batch is for {len(batch.shares)} ranks in this process, and here are {len(self.replicas)}. Write: {loop}.")
        if batch.step != self.next_step:
            raise TrainingError(
                f"This is the batch of step {batch.step + 1}, and the next step is {self.next_step + 1}: each batch is trained once, in order. Write: {loop}."
            )

    def _refuse_loop(self, call: str) -> None:
        self._check_open(call)
        if self.asynchronous:
            raise PlanError("exchange=async has no steps that all workers take together, so there is no loop of one's own. Use Trainer.fit().")

    def _resume(self, directory: Path) -> None:
        checkpoint = self.together(lambda replica: replica.resume(directory, partial(self._check_resumable, replica)))[0]
        self._tell(lambda: self._note_passed_over(checkpoint))
        self._go_on_with(checkpoint)
        self.next_step = checkpoint.step

    def _check_resumable(self, replica: Replica, checkpoint: Checkpoint) -> None:
        if "asynchronous" in checkpoint.values:
            raise CheckpointError(
                f"{checkpoint.path} was written under {checkpoint.plan_text}, whose steps are shares of a batch that workers push one by one. "
                "Go on with exchange=async, or start a new run."
            )
        checkpoint.check_data(self.job)
        checkpoint.check(replica.shards.fingerprint(replica.model))
        checkpoint.check_steps_left(self.steps)

    def _note_passed_over(self, checkpoint: Checkpoint) -> None:
        if said := passed_over(checkpoint.path):
            self.listener.note(said)

    def _go_on_with(self, checkpoint: Checkpoint) -> None:
        """The shares of the run so far, where they are measured here too and over as many replicas."""
        record: Record = checkpoint.values.get("shares", ())
        if self.plan.shares != "measured" or not record or self.shares.record:
            return
        dp = len(record[0][1])
        if dp == self.plan.dp:
            self.shares = Shares(self.plan, record)
        else:
            self._tell(
                lambda: self.listener.note(f"The shares in the checkpoint are of dp={dp} replicas, so shares begin even for dp={self.plan.dp}.")
            )

    def _check_separate(self) -> None:
        models = [id(replica.model) for replica in self.replicas]
        if len(set(models)) < len(models):
            raise JobError(
                "Job(model=...) returned the same module twice. Let the function build a new one at every call: every replica has its own."
            )

    def _enter(self, phase: Phase) -> None:
        for seat in self.world.local:
            seat.activity.enter(phase, self.next_step)

    def _tell(self, call: Callable[[], None]) -> None:
        if self.world.main:
            call()

    def _progress(self, loss: float) -> Progress:
        clock = self._clock
        seconds = max(clock.steps + clock.data, 1e-9)
        samples = self.job.batch_size * clock.num_steps / seconds
        return Progress(
            step=self.next_step,
            steps=self.steps,
            loss=loss,
            gradient_norm=self._results[0].gradient_norm,
            learning_rates=self.replicas[0].updater.learning_rates(),
            samples_per_second=samples,
            tokens_per_second=samples * self.job.tokens_per_sample if self.job.tokens_per_sample else None,
            seconds_left=seconds / clock.num_steps * (self.steps - self.next_step),
            memory_bytes=self.world.memory_bytes(),
        )

    def _predict(self, counted: Traffic) -> Traffic:
        replica = self.replicas[0]
        total: dict[str, int] = dict(replica.bytes_once())

        def add(part: Mapping[str, int], times: int) -> None:
            for name, count in part.items():
                total[name] = total.get(name, 0) + count * times

        add(replica.bytes_of_saves(), 1)
        add(replica.exchange.bytes_so_far(), 1)
        add(replica.bytes_per_step(), self._clock.num_steps)
        if self.plan.dp > 1:
            add({"all_gather": replica.bytes_per_check()}, self._checks)
            add({"all_reduce": replica.bytes_per_evaluation()}, self._evaluations)
        axes = {"dp": total} | {axis: replica.bytes_within(axis) for axis in self._axes_within}
        return Traffic({axis: {name: count for name, count in kinds.items() if count} for axis, kinds in axes.items()})


def _plan(plan: Plan | str | None) -> Plan:
    given = launched_plan()
    if plan is None:
        return Plan.parse(given) if given else Plan()
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    if not isinstance(chosen, Plan):
        raise PlanError(f"Trainer takes a Plan or its text, not a {type(plan).__name__}.")
    if given and replace(Plan.parse(given), keyed_draws=chosen.keyed_draws) != chosen:  # verification keys the draws of any plan
        raise PlanError(f"The program's own plan is {chosen} and the command line says --plan {given}. Leave one of them out, or make them equal.")
    return chosen


def _naming(rank: Steps[T], seat: Seat) -> Steps[T]:
    """A simulated rank, where an error of the user's code says on which one it happened."""
    try:
        return (yield from rank)
    except MeshloomError:
        raise
    except Exception as error:
        error.add_note(f"on simulated rank {seat.rank} ({seat.place})")
        raise

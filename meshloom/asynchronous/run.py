"""A run of an asynchronous plan on simulated devices: workers, servers and their messages on a virtual clock, the arithmetic in this process.

`steps` are updates: each is one worker's push, the mean over its share of a batch at the full learning rate. Evaluation and checkpoints look at a snapshot,
which is of one version on all servers; they take no virtual time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshloom.asynchronous.checkpoints import read_content, read_state, write_snapshot
from meshloom.asynchronous.parameters import Content, Parameters
from meshloom.asynchronous.replica import WorkerReplica
from meshloom.asynchronous.shares import Shares
from meshloom.asynchronous.team import TeamReplica, inner_plan
from meshloom.comm.simulated import simulated_groups
from meshloom.errors import CheckpointError, DeviceError, JobError, PlanError
from meshloom.exchange.elastic.circumstances import Circumstances
from meshloom.exchange.elastic.head import Head, Restored, Rules, Snapshot, Update, first_state
from meshloom.exchange.elastic.messages import Kind
from meshloom.exchange.elastic.store import Storage, Store
from meshloom.exchange.elastic.virtual import Parts, VirtualCluster
from meshloom.exchange.elastic.worker import Computed, Task
from meshloom.job import Job
from meshloom.launch import World
from meshloom.launch.one_process import world_in_one_process
from meshloom.plan import Plan
from meshloom.report.progress import Listener, Progress, Summary
from meshloom.report.summary import TimeShares, Traffic
from meshloom.report.terminal import how_many
from meshloom.state.checkpoint import Checkpoint, find
from meshloom.state.data import build_dataset, evaluation_chunks

AGES_SHOWN = 100  # newest updates over which the age that is shown is averaged


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run goes beside its job and plan. steps: updates of the whole run. snapshot_every: updates between snapshots to which servers can go back."""

    steps: int
    out: Path | None = None
    resume: Path | None = None
    dtype: torch.dtype | None = None
    snapshot_every: int = 100
    circumstances: Circumstances = field(default_factory=Circumstances)

    def __post_init__(self) -> None:
        if self.snapshot_every < 1:
            raise PlanError(f"snapshot_every={self.snapshot_every} must be 1 or more updates.")


class AsynchronousRun:
    """A job under a plan with exchange=async. `next_step` is the number of updates that are made, `model` what was last looked at."""

    def __init__(self, job: Job, plan: Plan, world: World, settings: Settings, listener: Listener) -> None:
        _check(plan, world)
        self._job, self._plan, self._world, self._settings, self._listener = job, plan, world, settings, listener
        self._device = world.local[0].device
        self._shares = Shares(job, plan)
        self._replica = self._build_replica()
        self._evaluation_data: Any = None
        checkpoint = Checkpoint.open(find(settings.resume)) if settings.resume is not None else None
        self.next_step = checkpoint.step if checkpoint else 0
        if checkpoint:
            checkpoint.check_steps_left(settings.steps)
        state = read_state(checkpoint, job, plan, self._shares, self.model) if checkpoint else first_state()
        kind = Kind(incarnation=0, state=state)
        start = self.next_step
        self._storages = [
            Storage(snapshots={start: (kind, read_content(checkpoint, self._replica, number) if checkpoint else None)}, newest=start)
            for number in range(plan.servers)
        ]
        self._newest = start, state  # snapshot that all servers have
        self._held: dict[int, Parameters] = {}
        self._cluster = self._build_cluster()
        self._ages: list[int] = []
        self._bytes: Counter[str] = Counter()
        self._push_bytes = self._pull_bytes = 0
        self._num_updates = 0
        self._lost = 0
        self._losses: list[float] = []
        self._began = time.monotonic()

    def _build_replica(self) -> WorkerReplica | TeamReplica:
        """On which all simulated workers compute, one after the other."""
        if not self._plan.reads:
            return WorkerReplica(self._job, self._plan, self._device, self._settings.dtype)
        devices = "simulated:cuda" if self._device.type == "cuda" else "simulated"
        return TeamReplica(self._job, self._plan, world_in_one_process(inner_plan(self._plan).mesh, devices), self._settings.dtype)

    @property
    def model(self) -> torch.nn.Module:
        """What was computed or evaluated with last."""
        return self._replica.model

    @property
    def cluster(self) -> VirtualCluster:
        """The workers, servers and the clock."""
        return self._cluster

    @property
    def ages(self) -> Counter[int]:
        """How many of the updates that count were computed at parameters of each age."""
        return self._cluster.head.ages

    def fit(self) -> Summary:
        """Train to the last update, evaluating and saving when due."""
        self._began = time.monotonic()
        evaluation: dict[str, float] = {}
        saved: Path | None = None
        for event in self._cluster.run():
            match event:
                case Update():
                    self._updated(event)
                case Restored():
                    self._restored(event)
                case Snapshot() if event.version > self._newest[0]:
                    self._newest = event.version, event.state
                    last = event.version == self._settings.steps
                    if self._job.evaluate and (last or event.version % self._job.evaluate.every == 0):
                        evaluation = self.evaluate()
                        self._listener.evaluated(event.version, evaluation)
                    if self._settings.out and (last or (self._job.checkpoint_every and event.version % self._job.checkpoint_every == 0)):
                        saved = self.save()
                        self._listener.saved(event.version, saved)
                case Snapshot():
                    pass  # one that was looked at before
        self._load_newest()
        for line in self.account():
            self._listener.note(line)
        return self.summary(time.monotonic() - self._began, evaluation, saved)

    def close(self) -> None:
        """Take the hooks off the models of workers that are divided."""
        if isinstance(self._replica, TeamReplica):
            self._replica.close()

    def evaluate(self) -> dict[str, float]:
        """Every metric of the job's `Evaluate` over all of its data, at the newest snapshot."""
        if self._job.evaluate is None:
            raise JobError("This job has nothing to evaluate. Give it evaluate=Evaluate(data, metrics, every).")
        if self._evaluation_data is None:
            self._evaluation_data = build_dataset(self._job.evaluate.data, self._job.seed)
        self._load_newest()
        return self._replica.evaluate(evaluation_chunks(self._evaluation_data, self._job, Plan(), simulated_groups(1)[0]))

    def save(self) -> Path:
        """Write the newest snapshot as a checkpoint into `out`; its path."""
        if self._settings.out is None:
            raise CheckpointError("There is nowhere to save to. Give Trainer(out=DIRECTORY), or --out DIRECTORY.")
        version, state = self._newest
        self._load_newest()
        return write_snapshot(self._settings.out, version, self._contents(version), state, self.model, self._job, self._plan)

    def account(self) -> list[str]:
        """What a reader should know at the end: virtual time, the workers' shares of it, ages, losses. A sentence each."""
        seconds, cluster = self._cluster.seconds, self._cluster
        updates = Counter(self.ages)
        total = max(1, updates.total())
        mean = sum(age * count for age, count in updates.items()) / total
        busy = " ".join(f"{worker}: {cluster.busy[worker] / max(there, 1e-9):.0%}" for worker, there in sorted(cluster.present.items()))
        ages = "  ".join(f"{age}: {count / total:.0%}" for age, count in sorted(updates.items()))
        lines = [
            f"virtual clock: {how_many(self._num_updates, 'update')} in {seconds:g} s, {self._num_updates / max(seconds, 1e-9):.3g} updates/s; "
            f"workers computed for this part of their time: {busy}",
            f"ages of the parameters behind the updates: mean {mean:.2f}; {ages}",
        ]
        if self._lost or cluster.head.refused:
            lines.append(f"{how_many(self._lost, 'update')} lost with servers; {cluster.head.refused} late pushes refused")
        return lines

    def record(self) -> dict[str, Any]:
        """The same for a program: virtual seconds, updates by age, updates lost, pushes refused, share of its time in which each worker computed."""
        cluster = self._cluster
        return {
            "virtual_seconds": cluster.seconds,
            "ages": {str(age): count for age, count in sorted(self.ages.items())},
            "lost": self._lost,
            "refused": cluster.head.refused,
            "computing": {str(worker): cluster.busy[worker] / max(there, 1e-9) for worker, there in sorted(cluster.present.items())},
        }

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes of all workers together, and shares of their virtual time."""
        cluster = self._cluster
        there = max(sum(cluster.present.values()), 1e-9)
        compute = sum(cluster.busy.values()) / there
        hops = 2 if self._plan.servers == 1 else 4  # push, (staged, give,) part
        communication = min(1 - compute, self._num_updates * hops * self._settings.circumstances.latency_seconds / there)
        predicted = {"push": self._num_updates * self._push_bytes, "pull": self._num_updates * self._pull_bytes}
        within = self._replica.traffic() if isinstance(self._replica, TeamReplica) else (Traffic({}), Traffic({}))
        return Summary(
            steps=self._num_updates,
            seconds=seconds,
            first_loss=self._losses[0] if self._losses else math.nan,
            last_loss=self._losses[-1] if self._losses else math.nan,
            evaluation=evaluation,
            predicted=Traffic({"dp": predicted, **within[0].bytes}),
            counted=Traffic({"dp": dict(self._bytes), **within[1].bytes}),
            shares=TimeShares(compute=compute, communication=communication, waiting=max(0.0, 1 - compute - communication), data=0.0),
            checkpoint=checkpoint,
        )

    # --- The cluster.

    def _build_cluster(self) -> VirtualCluster:
        job, plan, settings = self._job, self._plan, self._settings
        periods = [settings.snapshot_every, *([job.evaluate.every] if job.evaluate else [])]
        periods += [job.checkpoint_every] if settings.out and job.checkpoint_every else []
        rules = Rules(
            num_servers=plan.servers, staleness=plan.staleness, steps=settings.steps, keep_every=periods, rate_by_age=plan.rate_by_age
        )  # fmt: skip

        def store(number: int) -> Store:
            return Store(number, self._storages[number], lambda content: self._hold(number, content))

        parts = Parts(head=lambda incarnation: Head(rules, incarnation), store=store, compute=self._compute)
        return VirtualCluster(parts, settings.circumstances, num_servers=plan.servers, num_workers=plan.dp)

    def _hold(self, number: int, content: Content | None) -> Parameters:
        parameters = Parameters(
            self._job, number, self._plan.servers, whole=self._replica.whole, device=self._device, dtype=self._settings.dtype, content=content
        )
        others = [self._replica.model, *(held.model for server, held in self._held.items() if server != number)]
        if any(parameters.model is model for model in others):
            raise JobError(
                "Job(model=...) returned the same module twice. Let the function build a new one at every call: servers and workers have their own."
            )
        self._held[number] = parameters
        return parameters

    def _compute(self, worker: int, task: Task) -> Computed:
        self._bytes["pull"] += (pulled := sum(_num_bytes(part.values) + _num_bytes((part.buffers or {}).values()) for part in task.parts))
        self._replica.load([part.values for part in task.parts], task.parts[0].buffers)
        computed = self._replica.compute(worker, self._shares.read(task.share))
        self._bytes["push"] += (pushed := sum(map(_num_bytes, computed.gradients)) + _num_bytes(computed.changes.values()))
        self._pull_bytes, self._push_bytes = self._pull_bytes or pulled, self._push_bytes or pushed
        return computed

    def _updated(self, update: Update) -> None:
        self.next_step = update.version
        self._num_updates += 1
        self._losses[1:] = [update.loss]  # the first and the newest
        self._losses = self._losses or [update.loss]
        self._ages = [*self._ages[1 - AGES_SHOWN :], update.age]
        self._listener.step(self._progress(update))

    def _restored(self, event: Restored) -> None:
        if self._num_updates == 0 and not event.lost:
            return  # the start
        self._lost += event.lost
        self._listener.note(
            f"at {self._cluster.seconds:g} s a server was back, and all are at the snapshot of update {event.version} again: "
            f"the {how_many(event.lost, 'update')} after it are lost, and their samples are given out again"
        )

    def _progress(self, update: Update) -> Progress:
        seconds = max(time.monotonic() - self._began, 1e-9)
        samples = self._num_updates * self._job.batch_size / self._plan.dp / seconds
        return Progress(
            step=update.version,
            steps=self._settings.steps,
            loss=update.loss,
            gradient_norm=None if math.isnan(update.norm) else update.norm,
            learning_rates=self._held[0].learning_rates(),
            samples_per_second=samples,
            tokens_per_second=samples * self._job.tokens_per_sample if self._job.tokens_per_sample else None,
            seconds_left=seconds / self._num_updates * (self._settings.steps - update.version),
            memory_bytes=self._world.memory_bytes(),
            age=sum(self._ages) / len(self._ages),
            virtual_seconds=self._cluster.seconds,
        )

    # --- Snapshots and checkpoints.

    def _contents(self, version: int) -> list[Content]:
        return [storage.snapshots[version][1] for storage in self._storages]

    def _load_newest(self) -> None:
        contents = self._contents(self._newest[0])
        if contents[0] is None:  # nothing has run yet: the model is as the job built it
            return
        self._replica.load([content.values for content in contents], contents[0].buffers)


def _check(plan: Plan, world: World) -> None:
    if world.mesh.size != len(world.local):
        raise DeviceError("exchange=async runs on simulated devices, in one process. Use --devices simulated, or another exchange.")


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)

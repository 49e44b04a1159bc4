"""A run of an asynchronous plan on simulated devices: a virtual clock, and the arithmetic in this process.

`steps` are updates: each is one worker's push, the mean over its share of a batch at the full learning rate.
Evaluation and checkpoints use a snapshot, which is of one version on all servers; they take no virtual time.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshloom.asynchronous.account import RunAccount
from meshloom.asynchronous.protocol.events import Restored, Snapshot, Update
from meshloom.asynchronous.protocol.head import Head
from meshloom.asynchronous.protocol.store import Storage, Store
from meshloom.asynchronous.protocol.virtual import Parts, VirtualCluster
from meshloom.asynchronous.protocol.worker import Computed, Task
from meshloom.asynchronous.state.checkpoints import Start
from meshloom.asynchronous.state.parameters import Content, Parameters
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.asynchronous.state.settings import (
    AsynchronousSettings,
    check_foreground,
    refuse_common_steps,
    stopped_and_saved,
)
from meshloom.asynchronous.state.snapshot_evaluation import Inspection
from meshloom.asynchronous.state.worker_model import WorkerModel
from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.one_at_a_time import working_alone
from meshloom.launch.processes.signals import StopRequests
from meshloom.launch.world import World
from meshloom.telemetry.progress import Listener
from meshloom.telemetry.summary import Summary, TimeShares


class AsynchronousRun:
    """A `TrainingRun` of a job under a plan with exchange=async. next_step: the number of updates."""

    def __init__(
        self, job: Job, plan: Plan, world: World, settings: AsynchronousSettings, listener: Listener
    ) -> None:
        if world.mesh.size != len(world.local):
            raise DeviceError(
                "exchange=async starts its own processes, or simulates them in one. Use meshloom train without torchrun, or --devices simulated."
            )
        check_foreground(job)
        self._job, self._plan, self._world = job, plan, world
        self._settings, self._listener = settings, listener
        device = world.local[0].device
        self._shares = PushShares(job, plan)
        devices = "simulated:cuda" if device.type == "cuda" else "simulated"
        # on which all simulated workers compute, one after the other
        self._replica = WorkerReplica(job, plan, devices, settings.dtype)
        self._inspection = Inspection(job, plan, settings, self._replica)
        self._inspection.try_out()
        start = Start.find(settings, job, plan, self._shares, self.model)
        for note in (*start.notes(), *self._replica.take_notes()):
            listener.note(note)
        self.next_step = start.version
        self._servers = _Servers(job, plan, settings, self._replica.whole_model, device, start)
        self._newest = start.version, start.state  # snapshot that all servers have
        parts = Parts(
            head=partial(Head, settings.rules(job, plan)), store=self._servers.store, compute=self._compute
        )
        self.cluster = VirtualCluster(
            parts, settings.circumstances, num_servers=plan.servers, num_workers=plan.dp
        )
        self._account = RunAccount(job, plan, settings.steps)
        listener.started(f"plan {plan} on {world.why}, on a virtual clock")

    @property
    def model(self) -> torch.nn.Module:
        """With the values that were computed or evaluated with last."""
        return self._replica.model

    @property
    def ages(self) -> Counter[int]:
        """How many of the updates that count were computed at parameters of each age."""
        return self.cluster.head.ages

    def fit(self) -> Summary:
        """Train to the last update, evaluating and saving when due."""
        requests = StopRequests()
        with working_alone():
            try:
                if self._settings.out is not None:
                    requests.open()
                return self._fit(requests)
            finally:
                requests.close()

    def batches(self) -> NoReturn:
        """There are none that all workers take together. Raises `PlanError`."""
        refuse_common_steps()

    def step(self, batch: object) -> NoReturn:
        """Nor such steps. Raises `PlanError`."""
        refuse_common_steps()

    def _fit(self, requests: StopRequests) -> Summary:
        self._account.began = time.monotonic()
        evaluation: dict[str, float] = {}
        saved: Path | None = None
        ending = False
        for event in self.cluster.run():
            match event:
                case Update():
                    self._updated(event)
                    requests.arm()
                    if requests.received and not ending:
                        ending = True
                        self.cluster.ask_for_snapshot()
                case Restored():
                    self._restored(event)
                case Snapshot() if ending or event.version > self._newest[0]:
                    self._newest = event.version, event.state
                    if ending:
                        self._listener.saved(event.version, self.save())
                        raise stopped_and_saved(requests.received[0], event.version, self._settings)
                    if self._settings.evaluates(self._job, event.version):
                        evaluation = self.evaluate()
                        self._listener.evaluated(event.version, evaluation)
                    if self._settings.saves(self._job, event.version):
                        saved = self.save()
                        self._listener.saved(event.version, saved)
                case Snapshot():
                    pass  # evaluated and saved before
        self._inspection.load(self._servers.contents(self._newest[0]))
        cluster = self.cluster
        for line in self._account.lines(cluster.seconds, "virtual clock", self.ages, self._computing()):
            self._listener.note(line)
        summary = self.summary(time.monotonic() - self._account.began, evaluation, saved)
        self._listener.ended(summary)
        return summary

    def close(self) -> None:
        """Remove the hooks of the workers' models."""
        self._replica.close()

    def evaluate(self) -> dict[str, float]:
        """Every metric of the job's `Evaluate` over all of its data, at the newest snapshot."""
        return self._inspection.evaluate(self._servers.contents(self._newest[0]), self._newest[0])

    def save(self, *, wait: bool = True) -> Path:
        """Write the newest snapshot as a checkpoint into `out`; its path."""
        version, state = self._newest
        return self._inspection.save(version, self._servers.contents(version), state)

    def finish(self) -> None:
        """Nothing is written between calls."""

    def record(self) -> dict[str, Any]:
        """For a program: virtual seconds, updates by age, updates lost, share of its time in which each worker
        computed."""
        cluster = self.cluster
        return {
            "virtual_seconds": cluster.seconds,
            "ages": {str(age): count for age, count in sorted(self.ages.items())},
            "lost": self._account.lost,
            "computing": {str(worker): part for worker, part in sorted(self._computing().items())},
        }

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes of all workers together, and shares of their virtual time."""
        cluster = self.cluster
        there = max(sum(cluster.present.values()), 1e-9)
        compute = sum(cluster.busy.values()) / there
        hops = 2 if self._plan.servers == 1 else 4  # push, (staged, give,) part
        sending = self._account.num_updates * hops * self._settings.circumstances.latency_seconds / there
        communication = min(1 - compute, sending)
        waiting = max(0.0, 1 - compute - communication)
        shares = TimeShares(compute=compute, communication=communication, waiting=waiting, data=0.0)
        return self._account.summary(seconds, evaluation, checkpoint, shares)

    def _computing(self) -> dict[int, float]:
        busy, present = self.cluster.busy, self.cluster.present
        return {worker: busy[worker] / max(there, 1e-9) for worker, there in present.items()}

    def _compute(self, worker: int, task: Task) -> Computed:
        account = self._account
        pulled = sum(_num_bytes((*part.values, *(part.buffers or {}).values())) for part in task.parts)
        account.bytes["pull"] += pulled
        self._replica.whole_model.load([part.values for part in task.parts], task.parts[0].buffers)
        computed = self._replica.compute(worker, self._shares.read(task.share))
        pushed = sum(map(_num_bytes, computed.gradients)) + _num_bytes(computed.changes.values())
        account.bytes["push"] += pushed
        account.pull_bytes, account.push_bytes = account.pull_bytes or pulled, account.push_bytes or pushed
        return computed

    def _updated(self, update: Update) -> None:
        self.next_step = update.version
        self._account.updated(update)
        progress = self._account.progress(
            update,
            learning_rates=self._servers.parameters[0].learning_rates(),
            memory_bytes=self._world.memory_bytes(),
            virtual_seconds=self.cluster.seconds,
        )
        self._listener.step(progress)

    def _restored(self, event: Restored) -> None:
        lost, self.next_step = self.next_step - event.version, event.version
        if self._account.num_updates == 0 and not lost:
            for note in self._servers.parameters[0].notes():
                self._listener.note(note)
            return  # the start
        said = self._account.restored(event.version, lost)
        self._listener.note(f"at {self.cluster.seconds:g} s a server was back, and {said}")


class _Servers:
    """The servers of a simulated run. model: of the workers. parameters: what each server holds."""

    def __init__(
        self, job: Job, plan: Plan, settings: AsynchronousSettings, model: WorkerModel, device: torch.device,
        start: Start,
    ) -> None:  # fmt: skip
        self.parameters: dict[int, Parameters] = {}
        self._model = model
        self._hold_part = partial(
            Parameters, job, num_servers=plan.servers, whole=model.whole, device=device, dtype=settings.dtype
        )
        self._storages = [
            Storage(snapshots={start.version: start.snapshot(model, number)})
            for number in range(plan.servers)
        ]

    def store(self, number: int) -> Store:
        """The state machine of server `number`, as it starts."""
        return Store(number, self._storages[number], lambda content: self._hold(number, content))

    def contents(self, version: int) -> list[Content]:
        """The snapshot after update `version`, by server."""
        return [storage.snapshots[version][1] for storage in self._storages]

    def _hold(self, number: int, content: Content | None) -> Parameters:
        self.parameters[number] = parameters = self._hold_part(number=number, content=content)
        return parameters


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)

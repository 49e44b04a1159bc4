"""A worker's replica, of one rank or several along pp and tp: it computes gradients and updates nothing.

    first rank        the others
    load              -                 whole parameters from the servers stay on the first rank's host
    compute(share)    follow()          every rank takes its parts of them, all compute, the first gathers the gradients
    close()           return

Servers communicate with the first rank alone. What it sends to the others (parameters, data, commands)
travels over the ranks' group for decisions. One rank that runs the user's module has one model, which both
takes the values and computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from meshloom.asynchronous.protocol.worker import Computed
from meshloom.asynchronous.state.parameters import changes_of
from meshloom.asynchronous.state.settings import inner_plan
from meshloom.asynchronous.state.worker_model import WorkerModel
from meshloom.comm.group import Group
from meshloom.comm.objects import scatter_objects
from meshloom.comm.steps import Steps, run_in_steps
from meshloom.core.errors import DataError, JobError, TrainingError
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.core.plan_shares import chunk_sizes
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Slice
from meshloom.launch.one_process import world_in_one_process
from meshloom.launch.world import World
from meshloom.parameters.file_weights import build_filled_model
from meshloom.parameters.model import state_of
from meshloom.replica.expected_bytes import expected_bytes
from meshloom.replica.metrics import evaluate
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import full_gradients, full_state
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Command:
    """What all ranks do next."""

    what: Literal["compute", "evaluate", "end"]
    chunks: Iterable[Chunk] = ()
    updates: int = 0  # before an evaluation
    trial: bool = False  # of an evaluation


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Its result; gradients and buffers, whole, on the first rank alone."""

    what: str
    loss: float = 0.0
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    metrics: Mapping[str, float]


class WorkerReplica:
    """The ranks of `world`, whose mesh is that of `inner`: by default how a worker of `plan` computes."""

    def __init__(
        self, job: Job, plan: Plan, world: World, dtype: torch.dtype | None, inner: Plan | None = None
    ) -> None:
        job = in_precision(job, plan)
        self._job, self._world = job, world
        inner = inner or inner_plan(plan)
        share = sum(chunk_sizes(job.batch_size, plan.num_chunks)[: plan.microbatches])
        inner_job = replace(job, batch_size=share, clip_grad_norm=None)
        self._stack = ExitStack()
        host = build_filled_model(job, torch.device("cpu"), dtype) if inner.captures else None
        self._replicas: list[Replica] = []
        for rank in world.local:
            each = Replica(inner_job, inner, rank, dtype=dtype, updates=False)
            self._stack.callback(each.close)
            self._replicas.append(each)
        self.whole_model = WorkerModel(job, plan, host or self._replicas[0].model)
        self._together(lambda replica: replica.prepare())

    @property
    def model(self) -> torch.nn.Module:
        """Whole, with the values that were loaded last."""
        return self.whole_model.model

    def take_notes(self) -> list[str]:
        """Notes for the user about what forwards write, each once; clears them."""
        return list(dict.fromkeys(note for each in self._replicas for note in each.scope.take_notes()))

    @property
    def division(self) -> Sequence[Sequence[Slice]]:
        """The slices that each server holds."""
        return self.whole_model.division

    def load(self, values: Sequence[Sequence[Tensor]], buffers: Mapping[str, Tensor]) -> None:
        """Take parameters from all servers' slices (in order of servers), and buffers by name."""
        self.whole_model.load(values, buffers)

    def compute(self, worker: int, chunks: Sequence[Chunk]) -> Computed:
        """Mean gradient of a share at the loaded values. Raises `TrainingError` if it is not finite."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            answer = self._do(_Command(what="compute", chunks=chunks))
        except (TrainingError, DataError) as error:
            raise type(error)(f"Worker {worker}: {error}") from error
        changes = changes_of({name: before[name] for name in answer.buffers}, answer.buffers)
        return self.whole_model.computed(worker, chunks, answer.gradients, changes, answer.loss)

    def evaluate(self, chunks: Iterable[Chunk], updates: int, *, trial: bool = False) -> dict[str, float]:
        """Every metric over the chunks, in evaluation mode, at the loaded values, those after `updates` updates. trial: of `metrics.evaluate`."""
        sent = chunks if self._world.mesh.size == 1 else list(chunks)
        return dict(self._do(_Command(what="evaluate", chunks=sent, updates=updates, trial=trial)).metrics)

    def follow(self) -> None:
        """On the other ranks of processes: execute the first rank's commands until it closes."""
        while self._do(None).what != "end":
            pass

    def close(self) -> None:
        """Release the other ranks, and remove the models' hooks."""
        if self._world.main:
            self._do(_Command(what="end"))
        self._stack.close()

    def traffic(self) -> tuple[Traffic, Traffic]:
        """What the first rank sent along pp and tp so far: predicted, and counted."""
        rank = self._world.local[0]
        axes: list[Axis] = [axis for axis in ("pp", "tp") if axis in rank.groups]
        counted = Traffic.of({axis: rank.groups[axis].counts for axis in axes})
        return expected_bytes(self._replicas[0]).after().over(axes), counted

    def _do(self, command: _Command | None) -> _Answer:
        return self._together(lambda replica: self._execute(replica, command))[0]

    def _together(self, steps: Callable[[Replica], Steps[T]]) -> list[T]:
        """Run one generator per rank of this process to its end."""
        if len(self._replicas) == 1:
            return run_in_steps([steps(self._replicas[0])])
        return self._world.turns.run_steps([steps(replica) for replica in self._replicas])

    def _execute(self, replica: Replica, command: _Command | None) -> Steps[_Answer]:
        group = replica.context.world
        if group.size > 1:
            sent = [command] * group.size if group.rank == 0 else None
            command = yield from scatter_objects(group, sent)
        assert command is not None
        gradients: Mapping[str, Tensor | None] = {}
        buffers: Mapping[str, Tensor] = {}
        metrics: Mapping[str, float] = {}
        loss = 0.0
        if command.what != "end" and replica.model is not self.model:
            yield from self._take(replica, group)
        if command.what == "compute":
            chunks: Any = command.chunks
            found = yield from replica.gradients(chunks[0].step, chunks)
            if found.logged:
                raise JobError(
                    f"The loss logs {', '.join(found.logged)}, and with exchange=async no step has one mean over a global batch. "
                    "Take meshloom.log out, or measure it by Evaluate(metrics=...)."
                )
            loss, gradients = found.loss, (yield from full_gradients(replica, found))
            names = {name for name, _ in replica.model.named_buffers()}
            whole: Mapping[str, Tensor | None] = yield from full_state(replica)
            buffers = {name: each for name, each in whole.items() if name in names and each is not None}
        elif command.what == "evaluate":
            metrics = yield from evaluate(replica, command.chunks, command.updates, trial=command.trial)
        return _Answer(what=command.what, loss=loss, gradients=gradients, buffers=buffers, metrics=metrics)

    def _take(self, replica: Replica, group: Group) -> Steps[None]:
        """This rank's parts of the parameters and buffers of the first rank's model, one tensor at a time."""
        mine_of, values = state_of(replica.model), state_of(self.model).values()
        for (name, mine), value in zip(mine_of.items(), values, strict=True):
            whole = value.detach().contiguous()
            if group.rank != 0:
                whole = torch.empty_like(value, memory_format=torch.contiguous_format)
            work = group.broadcast(whole, 0)
            yield
            work.wait()
            if not mine.is_meta:
                mine.detach().copy_(replica.shards.take(name, whole))


def worker_replica_here(
    job: Job, plan: Plan, devices: str = "cpu", dtype: torch.dtype | None = None
) -> WorkerReplica:
    """The replica of a worker of `plan`, all of whose ranks are in this process."""
    return WorkerReplica(job, plan, world_in_one_process(inner_plan(plan).mesh, devices), dtype)

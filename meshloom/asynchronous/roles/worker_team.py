"""A worker of several ranks: it computes the gradient of a share with the model divided over them along pp
and tp.

    first rank        the others
    load              -                 whole parameters, as the servers gave them, stay on the host of the first rank
    compute(share)    follow()          every rank takes its parts of them, all compute, the first gathers the gradients
    close()           return

Servers talk with the first rank alone. What it hands to the others (parameters, data, what to do) travels
over the ranks' group for decisions.
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
from meshloom.asynchronous.state.worker_model import WorkerReplica
from meshloom.comm.group import Group
from meshloom.comm.objects import scatter_objects
from meshloom.comm.steps import Steps, run_in_steps
from meshloom.core.errors import DataError, JobError, TrainingError
from meshloom.core.job import Job
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.core.plan_shares import chunk_sizes
from meshloom.data.data import Chunk
from meshloom.launch.world import World
from meshloom.parameters.model import state_of
from meshloom.replica.evaluation import evaluate
from meshloom.replica.expected_bytes import expected_bytes
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import whole_gradients, whole_state
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Command:
    """What the first rank lets all do."""

    what: Literal["compute", "evaluate", "end"]
    chunks: Sequence[Chunk] = ()


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What came of it; gradients and buffers, whole, on the first rank alone."""

    what: str
    loss: float = 0.0
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]
    metrics: Mapping[str, float]


class TeamReplica:
    """As `WorkerReplica`, on the ranks of `world`, whose mesh is that of `inner_plan(plan)`. `model` is whole
    and lies on the host of the first rank."""

    def __init__(self, job: Job, plan: Plan, world: World, dtype: torch.dtype | None) -> None:
        self._job = job
        self._world = world
        self._host = WorkerReplica(job, plan, torch.device("cpu"), dtype)
        inner = inner_plan(plan)
        share = sum(chunk_sizes(job.batch_size, plan.num_chunks)[: plan.microbatches])
        inner_job = replace(job, batch_size=share, clip_grad_norm=None)
        self._replicas = [Replica(inner_job, inner, seat, dtype=dtype, updates=False) for seat in world.local]
        self._stack = ExitStack()
        for each in self._replicas:
            self._stack.callback(each.close)
        models = [self.model, *(each.model for each in self._replicas)]
        if len({id(each) for each in models}) < len(models):
            raise JobError(
                "Job(model=...) returned the same module twice. Let the function build a new one at every call: every rank has its own."
            )
        self._together(lambda replica: replica.prepare())

    @property
    def model(self) -> torch.nn.Module:
        """With the values that were loaded last."""
        return self._host.model

    @property
    def whole(self) -> bool:
        """As `WorkerReplica.whole`."""
        return self._host.whole

    @property
    def division(self) -> Any:
        """As `WorkerReplica.division`."""
        return self._host.division

    def load(self, values: Sequence[Sequence[Tensor]], buffers: Mapping[str, Tensor]) -> None:
        """As `WorkerReplica.load`."""
        self._host.load(values, buffers)

    def compute(self, worker: int, chunks: Sequence[Chunk]) -> Computed:
        """As `WorkerReplica.compute`."""
        try:
            answer = self._do(_Command(what="compute", chunks=chunks))
        except (TrainingError, DataError) as error:
            raise type(error)(f"Worker {worker}: {error}") from error
        before = dict(self.model.named_buffers())
        after = {name: each for name, each in answer.buffers.items() if each is not None}
        return self._host.computed(
            worker,
            chunks,
            answer.gradients,
            changes_of({name: before[name] for name in after}, after),
            answer.loss,
        )

    def evaluate(self, chunks: Iterable[Chunk]) -> dict[str, float]:
        """As `WorkerReplica.evaluate`."""
        return dict(self._do(_Command(what="evaluate", chunks=list(chunks))).metrics)

    def follow(self) -> None:
        """On the other ranks of processes: do what the first rank says until it closes."""
        while self._do(None).what != "end":
            pass

    def close(self) -> None:
        """Let the other ranks go, and take the hooks off the models."""
        if self._world.main:
            self._do(_Command(what="end"))
        self._stack.close()

    def traffic(self) -> tuple[Traffic, Traffic]:
        """What the first rank handed over along pp and tp so far: as formulas say, and as counted."""
        seat = self._world.local[0]
        axes: list[Axis] = [axis for axis in ("pp", "tp") if axis in seat.groups]
        counted = Traffic.of({axis: seat.groups[axis].counts for axis in axes})
        return expected_bytes(self._replicas[0]).after().over(axes), counted

    def _do(self, command: _Command | None) -> _Answer:
        return self._together(lambda replica: self._obey(replica, command))[0]

    def _together(self, steps: Callable[[Replica], Steps[T]]) -> list[T]:
        """Run one generator per rank that lives here to its end."""
        if len(self._replicas) == 1:
            return run_in_steps([steps(self._replicas[0])])
        return self._world.turns.run_steps([steps(replica) for replica in self._replicas])

    def _obey(self, replica: Replica, command: _Command | None) -> Steps[_Answer]:
        group = replica.seat.world
        told: _Command = yield from scatter_objects(
            group, [command] * group.size if group.rank == 0 else None
        )
        gradients: Mapping[str, Tensor | None] = {}
        buffers: Mapping[str, Tensor | None] = {}
        metrics: Mapping[str, float] = {}
        loss = 0.0
        if told.what != "end":
            yield from self._take(replica, group)
        if told.what == "compute":
            found = yield from replica.gradients(told.chunks[0].step, told.chunks)
            loss, gradients = found.loss, (yield from whole_gradients(replica, found))
            names = {name for name, _ in replica.model.named_buffers()}
            whole = yield from whole_state(replica)
            buffers = {name: each for name, each in whole.items() if name in names}
        elif told.what == "evaluate":
            metrics = yield from evaluate(replica, told.chunks)
        return _Answer(what=told.what, loss=loss, gradients=gradients, buffers=buffers, metrics=metrics)

    def _take(self, replica: Replica, group: Group) -> Steps[None]:
        """Parameters and buffers of the first rank's whole model, this rank's parts of them, one tensor at a
        time."""
        for (name, mine), value in zip(
            state_of(replica.model).items(), state_of(self.model).values(), strict=True
        ):
            whole = (
                value.detach().contiguous()
                if group.rank == 0
                else torch.empty_like(value, memory_format=torch.contiguous_format)
            )
            work = group.broadcast(whole, 0)
            yield
            work.wait()
            if not mine.is_meta:
                mine.detach().copy_(replica.shards.take(name, whole))

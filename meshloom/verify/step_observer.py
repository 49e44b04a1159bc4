"""Observes the steps of one rank's replica: what its chunks received, drew and computed, and its gradients and state, which
rank 0 compares as they arrive.

It adds to the steps that the Trainer takes, and takes the place of nothing in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.data.chunks import Chunk
from meshloom.optimizer.bfloat16.masters import masters_of
from meshloom.parameters.digest import digest
from meshloom.replica.replica import Gradients, Replica
from meshloom.replica.replica_state import each_average, each_gradient, each_of_state, replicated_state
from meshloom.telemetry.step_result import StepResult
from meshloom.verify.comparison_run import Comparing
from meshloom.verify.reference.observers import DrawWatch, ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import default_dtype
from meshloom.verify.reference.step_records import (
    ChunkRecord,
    ModuleOutput,
    StepRecord,
    group_settings,
)


class StepObserver:
    """An `Observer` of `replica`. comparison: on rank 0, receives each tensor as it is gathered; no rank keeps one."""

    def __init__(self, replica: Replica, comparison: Comparing | None) -> None:
        self._replica, self._comparison = replica, comparison
        self._default = torch.get_default_dtype()  # of one device, around what it computes by itself
        self._modules = ModuleWatch(replica.model)
        plan = replica.inner
        # Draws of programs are not observed, and compiled ones are other operators; keyed ones are reported one by one.
        seen = not (plan.captures or plan.compiles or plan.keyed_draws)
        self._watch = DrawWatch(replica.context.device) if seen else None
        self._chunks: list[ChunkRecord] = []
        self._computed: list[ChunkRecord] = []  # in the first half of the step
        self._draws: list[str] = []
        self._seed, self._outputs = 0, tuple[ModuleOutput, ...]()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """A context in which modules are observed."""
        if (
            self._replica.plan.compiles
        ):  # Hooks would be compiled with them; what they record only helps to find causes.
            yield
        else:
            with self._modules.attached():
                yield

    @contextmanager
    def watch(self, chunk: Chunk, model: nn.Module) -> Iterator[list[str]]:
        """Wraps a chunk's forward and backward; yields the list for the digests of its keyed draws."""
        self._draws, self._seed = [], torch.initial_seed()
        self._modules.start()
        if self._watch:
            self._watch.start()
        yield self._draws
        self._draws += self._watch.stop() if self._watch else []
        self._outputs = self._modules.stop()

    def chunk_done(self, chunk: Chunk, weight: float, loss_sum: float) -> None:
        """Record the chunk, whose forward and backward may still be under way."""
        self._chunks.append(
            ChunkRecord(
                index=chunk.index, samples=chunk.samples, weight=weight, loss_sum=loss_sum, data=digest_values(chunk.data), seed=self._seed,
                draws=tuple(self._draws), modules=self._outputs,
            )
        )  # fmt: skip

    def computed(self, gradients: Gradients) -> Steps[None]:
        """Compare the averaged gradients."""
        yield  # until all ranks of this process have computed theirs
        self._computed, self._chunks = self._chunks, []
        self._replica.context.activity.enter("comparing", gradients.step)
        compared = self._comparison
        self._apart(compared.begin if compared else _ignore)
        take = compared.add_gradient if compared else _ignore
        yield from each_gradient(self._replica, gradients, partial(self._apart, take))
        self._apart(compared.update if compared else _ignore)

    def updated(self, result: StepResult) -> Steps[None]:
        """Compare the state, and the rest of the step."""
        self._chunks = []  # those of further evaluations, which LBFGS makes
        self._replica.context.activity.enter("comparing", result.step)
        compared = self._comparison
        take = compared.add_state if compared else _ignore
        yield from each_of_state(self._replica, partial(self._apart, take))
        if self._replica.job.average is not None:
            self._apart(compared.begin_averages if compared else _ignore)
            take = compared.add_average if compared else _ignore
            yield from each_average(self._replica, partial(self._apart, take))
        record = yield from self._record(result)
        self._apart(compared.end if compared else _ignore, record)

    def _apart(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls what belongs to one device, in the precision of new tensors that it has."""
        with default_dtype(self._default):
            call(*arguments)

    def _record(self, result: StepResult) -> Steps[StepRecord]:
        world = self._replica.context.world
        # recorded on the ranks with tp=0 and, in a pipeline, of the last stage
        mine = [each.to_dict() for each in self._computed] if self._replica.context.place.tp == 0 else []
        chunks: list[list[dict[str, Any]]] = yield from collect(world, mine)
        digests = yield from _digests(self._replica)
        inconsistent = yield from _inconsistencies(self._replica)
        mine_set = group_settings(self._replica.updater.state.optimizers)
        settings: list[dict[str, float]] = yield from collect(world, mine_set)
        records = (ChunkRecord.from_dict(chunk) for of_rank in chunks for chunk in of_rank)
        return StepRecord(
            step=result.step, loss=result.loss, weight=result.weight, gradient_norm=result.gradient_norm,
            gradients={}, chunks=sorted(records, key=lambda chunk: chunk.index),
            replicas=[*map(digest_values, digests)], inconsistent=inconsistent, skipped=result.skipped,
            settings=settings,
        )  # fmt: skip


def _ignore(*arguments: Any) -> None:
    """What arrives is compared on rank 0 alone."""


def _digests(replica: Replica) -> Steps[list[list[int]]]:
    """For every replica, hashes of all state on its ranks: equal for equal replicas."""
    of_ranks = yield from collect(
        replica.context.world, [int(digest(each)) for each in replicated_state(replica).values()]
    )
    return [[each for rank in ranks for each in of_ranks[rank]] for ranks in replica.plan.mesh.teams()]


def _inconsistencies(replica: Replica) -> Steps[list[str]]:
    """Differences between the ranks of a replica in replicated state."""
    mine = yield from replica.engine.check_replicated()
    masters = masters_of(replica.exchange)
    if masters and (name := masters.wrong()) is not None:
        mine = f"{name} of rank {replica.context.rank} is not the rounding of the copy that is updated"
    of_ranks: list[str | None] = yield from collect(replica.context.world, mine)
    return list(dict.fromkeys(each for each in of_ranks if each))

"""Observes the steps of one rank's replica: what its chunks received and computed, and its gradients and state, which
rank 0 compares as they arrive.

It adds to the steps that the Trainer takes, and takes the place of nothing in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch

from meshloom.comm.objects import gather_objects
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.machine.process_memory import trim
from meshloom.parameters.digest import digest
from meshloom.replica.replica import Gradients, Replica
from meshloom.replica.replica_state import each_average, each_gradient, each_of_state, replicated_state
from meshloom.telemetry.step_result import StepResult
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.reference.observers import ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import default_dtype
from meshloom.verify.reference.step_records import ChunkRecord, StepRecord, settings_of


class StepObserver:
    """An `Observer` of `replica`. comparison: on rank 0, receives each tensor as it is gathered; no rank keeps one. alone: whether the
    rank has a process to itself, which returns freed memory while one device computes, elsewhere."""

    def __init__(self, replica: Replica, comparison: ComparisonRun | None, *, alone: bool = False) -> None:
        self._replica, self._comparison, self._alone = replica, comparison, alone
        self._default = torch.get_default_dtype()  # of one device, around what it computes by itself
        self._modules = ModuleWatch(replica.model)
        self._chunks: dict[int, ChunkRecord] = {}  # once their contexts are left
        self._computed: list[ChunkRecord] = []  # in the first half of the step

    @contextmanager
    def attached(self) -> Iterator[None]:
        """A context in which modules are observed."""
        # hooks would be compiled with them; they only help to find the place
        with nullcontext() if self._replica.plan.compiles else self._modules.attached():
            yield

    @contextmanager
    def watch(self, chunk: Chunk) -> Iterator[None]:
        """Wraps a chunk's forward and, where its stage is the only one, its backward."""
        self._modules.start()
        yield
        data, modules = digest_values(chunk.data), self._modules.stop()
        self._chunks[chunk.index] = ChunkRecord(
            index=chunk.index, samples=chunk.samples, data=data, modules=modules
        )

    def computed(self, gradients: Gradients) -> None:
        """Compare the averaged gradients."""
        if self._alone:
            trim()
        self._computed, self._chunks = [*self._chunks.values()], {}
        self._replica.context.activity.enter("comparing", gradients.step)
        self._tell("begin")
        each_gradient(self._replica, gradients, partial(self._tell, "add_gradient"))
        self._tell("update")

    def updated(self, result: StepResult) -> None:
        """Compare the state, and the rest of the step."""
        self._chunks = {}  # those of further evaluations, which LBFGS makes
        self._replica.context.activity.enter("comparing", result.step)
        each_of_state(self._replica, partial(self._tell, "add_state"))
        self._tell("average")  # whether there are averages is not for the plan to say
        each_average(self._replica, partial(self._tell, "add_average"))
        # [] on other ranks than the first
        if seen := gather_objects(self._replica.context.world, self._seen()):
            self._tell("end", _record(result, seen, self._replica.plan))

    def _seen(self) -> tuple[Any, ...]:
        """What this rank says of the step, and of what it holds after it: of `_record`."""
        replica, updater = self._replica, self._replica.updater
        # recorded on the ranks with tp=0 and, in a pipeline, of the last stage
        chunks = self._computed if replica.context.place.tp == 0 else []
        held = [(name, int(digest(each))) for name, each in replicated_state(replica).items()]
        inconsistent = replica.engine.check_replicated()
        if replica.masters and (name := replica.masters.wrong()) is not None:
            rank = replica.context.rank
            inconsistent = f"{name} of rank {rank} is not the rounding of the copy that is updated"
        state, rates = updater.state, updater.learning_rates()
        return chunks, held, inconsistent, settings_of(state.optimizers, state.schedulers, rates)

    def _tell(self, call: str, *arguments: Any) -> None:
        """Calls what belongs to one device on rank 0, in the precision of new tensors that it has."""
        if self._comparison is not None:
            with default_dtype(self._default):
                getattr(self._comparison, call)(*arguments)


def _record(result: StepResult, seen: Sequence[Any], plan: Plan) -> StepRecord:
    """seen: of each rank, its chunks, digests of what it holds, what is inconsistent, and settings."""
    chunks, held, inconsistent, settings = zip(*seen, strict=True)
    # of every replica, what its ranks hold: equal for equal replicas
    replicas = [[each for rank in ranks for each in held[rank]] for ranks in plan.mesh.teams()]
    apart = [
        first[0]
        for first, *others in zip_longest(*replicas)
        if first and any(each != first for each in others)
    ]
    return StepRecord(
        step=result.step, loss=result.loss, weight=result.weight, gradient_norm=result.gradient_norm,
        gradients={}, chunks=sorted(chain(*chunks), key=lambda chunk: chunk.index),
        replicas=[*map(digest_values, replicas)], apart=list(dict.fromkeys(apart)), logged=result.logged, skipped=result.skipped,
        inconsistent=list(dict.fromkeys(each for each in inconsistent if each)), settings=settings
    )  # fmt: skip

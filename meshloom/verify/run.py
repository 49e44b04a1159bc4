"""Runs a job under a plan and on one device, step by step in step, and holds one against the other.

The plan runs through the ordinary trainer, with every random draw keyed; an observer in each replica notes
what its chunks
were given and what came out. Rank 0 collects the notes, runs the same step on one device and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.launch.one_at_a_time import working_alone
from meshloom.parameters.digest import digest
from meshloom.parameters.model import build_model, check_dense_buffers, state_of
from meshloom.parameters.pipeline_ownership import held
from meshloom.replica.replica import Replica, StepResult
from meshloom.replica.replica_state import each_gradient, each_of_state
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.divided_nodes import first_difference
from meshloom.verify.findings import Report
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.observers import ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import default_dtype
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput, StepRecord


def verify(
    job: Job,
    plan: Plan,
    *,
    devices: str = "auto",
    steps: int = 3,
    dtype: torch.dtype | None = None,
    timeout_seconds: float = 600.0,
    transport: str = "auto",
    oversubscribe: bool = False,
) -> Report | None:
    """Run `steps` steps of `job` under `plan` and on one device, and compare. None on ranks other than 0,
    which cannot tell.

    dtype: run both in this precision; float64 tells a mistake from rounding. Raises as the trainer does.
    """
    check_promised(plan)
    keyed = replace(plan, keyed_draws=True)
    recorded = _changing_shares(plan, steps)
    quiet = Listener(started=lambda text: None)  # the report says it
    with working_alone(), Trainer(
        replace(job, evaluate=None), keyed, devices=devices, steps=steps, timeout_seconds=timeout_seconds, transport=transport, dtype=dtype, share=True, listener=quiet,
        recorded_shares=recorded, oversubscribe=oversubscribe, cache="off",
    ) as trainer:  # fmt: skip
        check_dense_buffers(trainer.replicas[0].model, "only dense buffers are compared")
        owned = trainer.together(_owned)[0]
        holding = (
            ComparisonRun(Reference(job, keyed, dtype, trainer.replicas[0].seat.device, recorded))
            if trainer.world.main
            else None
        )
        _run_steps(trainer, dtype, holding)
        if holding is None:
            return None
        found = holding.found()
        causes = [
            *found.causes,
            *([] if all(step.passed for step in found.steps) else _of_division(trainer, job, keyed, dtype)),
        ]
        return Report(
            plan=str(plan), devices=trainer.world.why, precision=str(found.comparer.precision).removeprefix("torch."), owned=owned,
            steps=found.steps, causes=causes, casts=found.comparer.casts, whole=found.whole,
        )  # fmt: skip


def check_promised(plan: Plan) -> None:
    """Raise `PlanError` naming the setting if the plan does not promise to equal one device."""
    if plan.exempt:
        raise PlanError(
            f"{plan.exempt}: such a plan does not promise to compute what one device computes, so there is nothing to verify. "
            "Verify it without that setting, and compare losses with it."
        )


def _changing_shares(plan: Plan, steps: int) -> list[tuple[int, tuple[int, ...]]]:
    """What is verified where shares are measured: others in every step after the first, because what they are
    must not matter."""
    if plan.shares != "measured":
        return []
    return [
        (step, tuple(1 + (replica + step) % plan.dp for replica in range(plan.dp)))
        for step in range(1, max(steps, 2))
    ]


def _of_division(trainer: Trainer, job: Job, plan: Plan, dtype: torch.dtype | None) -> list[Cause]:
    """Where a divided program is wrong, if it is."""
    replica = trainer.replicas[0]
    division = replica.engine.division
    if division is None:
        return []
    device = replica.seat.device
    (batch,) = first_batches(job, 1, plan.largest_share(job.batch_size)[0])
    return [
        Cause(
            "division",
            first_difference(
                division.first, build_model(job, device, dtype), to_device(batch, device, dtype)
            ),
        )
    ]


def _run_steps(trainer: Trainer, dtype: torch.dtype | None, holding: ComparisonRun | None) -> None:
    """All steps. `holding`, where there is one, is told of each tensor as it comes; no rank keeps any."""
    first = trainer.replicas[0]
    with ExitStack() as stack:
        notes = [stack.enter_context(_observed(replica)) for replica in trainer.replicas]
        for batch in trainer.batches():
            for note in notes:
                note.chunks = []
            shares = dict(zip(map(id, trainer.replicas), batch.shares, strict=True))
            # Not trainer.step, which raises when replicas drift apart: that is for the report to say.
            with default_dtype(dtype):
                gradients = trainer.together(
                    lambda replica: replica.gradients(batch.step, shares[id(replica)])  # noqa: B023
                )
            found = dict(zip(map(id, trainer.replicas), gradients, strict=True))
            if holding:
                holding.begin()
            trainer.together(
                lambda replica: each_gradient(
                    replica,
                    found[id(replica)],  # noqa: B023
                    holding.gradient if holding and replica is first else _ignore,
                )
            )
            with default_dtype(dtype):
                result = trainer.together(lambda replica: replica.update(found[id(replica)]))[0]  # noqa: B023
            trainer.next_step = batch.step + 1
            if holding:
                holding.update()
            trainer.together(
                lambda replica: each_of_state(
                    replica, holding.state if holding and replica is first else _ignore
                )
            )
            record = _record(trainer, result, notes, holding.subsampled if holding else {})
            if holding:
                holding.end(record)


def _ignore(name: str, tensor: Tensor | None) -> None:
    """What only rank 0 looks at."""


def _record(
    trainer: Trainer, result: StepResult, notes: Sequence[_Notes], gradients: Mapping[str, Tensor | None]
) -> StepRecord:
    mine = dict(zip(map(id, trainer.replicas), notes, strict=True))
    chunks = trainer.together(
        lambda replica: collect(replica.seat.world, _chunks(replica, mine[id(replica)]))
    )[0]
    digests = trainer.together(_digests)[0]
    rerun_distance = trainer.together(_unlike)[0]
    return StepRecord(
        step=result.step,
        loss=result.loss,
        weight=result.weight,
        gradient_norm=result.gradient_norm,
        gradients=gradients,
        chunks=sorted(
            (ChunkRecord.from_dict(chunk) for of_rank in chunks for chunk in of_rank),
            key=lambda chunk: chunk.index,
        ),
        replicas=[*map(digest_values, digests), *rerun_distance],
    )


@dataclass
class _Notes:
    """What one replica's step was given, and what came out: an `Observer` of its chunks."""

    modules: ModuleWatch
    chunks: list[ChunkRecord] = field(default_factory=list[ChunkRecord])
    _draws: list[str] = field(default_factory=list[str])
    _seed: int = 0
    _outputs: tuple[ModuleOutput, ...] = ()

    @contextmanager
    def watch(self, chunk: Chunk, model: nn.Module) -> Iterator[list[str]]:
        """Around a chunk's forward and backward; the list is to receive the digests of its draws."""
        self._draws, self._seed = [], torch.initial_seed()
        self.modules.start()
        yield self._draws
        self._outputs = self.modules.stop()

    def chunk_done(self, chunk: Chunk, weight: float, loss_sum: float) -> None:
        """Note the chunk."""
        self.chunks.append(
            ChunkRecord(
                index=chunk.index,
                samples=chunk.samples,
                weight=weight,
                loss_sum=loss_sum,
                data=digest_values(chunk.data),
                seed=self._seed,
                draws=tuple(self._draws),
                modules=self._outputs,
            )
        )


@contextmanager
def _observed(replica: Replica) -> Iterator[_Notes]:
    watch = ModuleWatch(replica.model)
    with watch.attached():
        replica.scope.observer = notes = _Notes(watch)
        try:
            yield notes
        finally:
            replica.scope.observer = None


def _chunks(replica: Replica, notes: _Notes) -> list[dict[str, Any]]:
    """The replica's chunks, told by one of its ranks."""
    # and those of a pipeline by the last stage
    return [chunk.to_dict() for chunk in notes.chunks] if replica.seat.place.tp == 0 else []


def _owned(replica: Replica) -> Steps[list[float]]:
    """Share of the trainable elements that each rank updates."""
    elements = replica.num_trainable
    mine = sum(part.stop - part.start for part in replica.exchange.owned)
    return (yield from collect(replica.seat.world, mine / elements))


def _digests(replica: Replica) -> Steps[list[list[int]]]:
    """Of every replica, hashes of all that its ranks hold: equal for equal replicas."""
    everyone = yield from collect(
        replica.seat.world, [int(digest(each)) for each in held(state_of(replica.model).items()).values()]
    )
    return [[each for rank in ranks for each in everyone[rank]] for ranks in replica.plan.mesh.teams()]


def _unlike(replica: Replica) -> Steps[list[str]]:
    """What ranks of a replica should hold alike and do not: for the report to say."""
    mine = yield from replica.engine.check_replicated()
    everyone: list[str | None] = yield from collect(replica.seat.world, mine)
    return list(dict.fromkeys(each for each in everyone if each))

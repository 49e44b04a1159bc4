"""Runs a job under a plan and on one device, step by step, and compares the two.

The plan runs in the ordinary trainer, with every random draw keyed; an observer in each replica records what
its chunks received and computed. Rank 0 collects the records, runs the same step on one device and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.errors import DeviceError, PlanError
from meshloom.core.job import Job
from meshloom.core.losses.turns import LossTurn, turns_of
from meshloom.core.moments.numerics import numeric_settings
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS, Precision
from meshloom.data.chunks import Chunk
from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.launch.environment import launched_rank
from meshloom.launch.one_at_a_time import working_alone
from meshloom.optimizer.bfloat16.masters import masters_of
from meshloom.parameters.digest import digest
from meshloom.parameters.file_weights import build_filled_model
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import each_average, each_gradient, each_of_state, replicated_state
from meshloom.telemetry.progress import Listener
from meshloom.telemetry.step_result import StepResult
from meshloom.train.contract import Batch
from meshloom.train.trainer import Trainer
from meshloom.verify.against_float64 import AgainstFloat64
from meshloom.verify.compare import Comparer, rounds_partial_sums
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.fewer_blocks import with_fewer_blocks
from meshloom.verify.findings import Report
from meshloom.verify.lockstep_check import first_wrong_operator
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.observers import ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import default_dtype
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput, StepRecord
from meshloom.verify.reference_size import check_reference_fits


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
    overcommit: bool = False,
    blocks: int | None = None,
    against: torch.dtype | None = None,
) -> Report | None:
    """Run `steps` steps of `job` under `plan` and on one device, and compare. Returns None on ranks other
    than 0.

    dtype: run both in this precision; float64 tells a mistake from rounding. blocks: how many of the model's
    repeated blocks both run; None: all. against: float64, to measure in the first step how far
    the plan, and one device at its precision, are from one device in it. overcommit: run although memory is predicted not to
    suffice. Raises as the trainer does, and `DeviceError` if one device cannot
    hold what the plan is compared with.
    """
    check_promised(plan)
    if against is not None and (against != torch.float64 or dtype == torch.float64):
        raise DeviceError(
            f"against={_name_of(against)} with dtype={_name_of(dtype)} measures no distance from float64. Use against=float64 and another dtype, or none."
        )
    if blocks is not None:
        fewer = with_fewer_blocks(job, blocks)
        try:
            report = verify(
                fewer.job, plan, devices=devices, steps=steps, dtype=dtype, timeout_seconds=timeout_seconds, transport=transport,
                oversubscribe=oversubscribe, overcommit=overcommit, against=against,
            )  # fmt: skip
        except Exception as error:
            error.add_note(fewer.sentence)  # it may be why
            raise
        return replace(report, fewer=fewer) if report else None
    launched = launched_rank()
    if launched is None or launched.rank == 0:  # the one that runs the reference
        on_gpu = devices == "auto" and 0 < plan.mesh.size <= torch.cuda.device_count()
        check_reference_fits(job, dtype, on_gpu=on_gpu or devices.endswith("cuda"), twice=against is not None)
    keyed = replace(plan, keyed_draws=True)
    shares = _varying_shares(plan, steps)
    quiet = Listener(started=lambda text: None)  # the report describes the run
    with working_alone(), Trainer(
        replace(job, evaluate=None), keyed, devices=devices, steps=steps, timeout_seconds=timeout_seconds, transport=transport, dtype=dtype, share=True, listener=quiet,
        recorded_shares=shares, oversubscribe=oversubscribe, overcommit=overcommit, cache="off",
    ) as trainer:  # fmt: skip
        owned = trainer.together(_owned)[0]
        comparison: ComparisonRun | None = None
        if trainer.world.main:
            device = trainer.replicas[0].context.device
            exact = Reference(job, keyed, against, device, shares) if against is not None else None
            comparison = ComparisonRun(
                Reference(job, keyed, dtype, device, shares), AgainstFloat64(exact) if exact else None
            )
        _run_steps(trainer, dtype, comparison)
        if comparison is None:
            return None
        result = comparison.result()
        causes = list(result.causes)
        if not all(step.passed for step in result.steps):
            causes += _wrong_operator(trainer, trainer.replicas[0].job, keyed, dtype)
        return Report(
            plan=str(plan), devices=trainer.world.why, precision=str(result.comparer.precision).removeprefix("torch."), owned=owned,
            steps=result.steps, causes=causes, casts=result.comparer.casts, whole=result.whole, autocast=_of_precision(keyed, result.comparer, dtype),
            settings=numeric_settings(), from_float64=result.from_float64,
        )  # fmt: skip


def _name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _of_precision(plan: Plan, comparer: Comparer, dtype: torch.dtype | None) -> str:
    if dtype == torch.float64 and PRECISIONS[plan.precision] != Precision():
        why = "autocast casts nothing in float64" if comparer.autocast else "both sides are in float64"
        return f"precision={plan.precision} is left out on both sides, as {why}"
    rounded = comparer.autocast or comparer.lowered
    if rounded is None:
        return ""
    name = _name_of(rounded)
    if comparer.autocast:
        what = f"losses are computed under autocast to {name}, on one device too"
        if PRECISIONS[plan.precision].scaled:
            what += ", and scaled, by each with a scale of its own"
    elif PRECISIONS[plan.precision].masters:
        what = f"parameters are {name}, each the rounding of a copy in {_name_of(comparer.precision)} that is updated and compared, on one device too"
    else:
        what = f"parameters are {name}, updated in {_name_of(comparer.precision)} and rounded by the same draws on one device"
    if not rounds_partial_sums(plan):
        return what
    if plan.compiles:
        return f"{what}; compiled operators round to it in other places, so gradients may differ as far as rounding moves one device's"
    setting = f"tp={plan.tp}" if plan.tp > 1 else "sync_batch_norm=true"
    return f"{what}; with {setting} partial sums are rounded to it, so gradients may differ as far as rounding moves one device's"


def check_promised(plan: Plan) -> None:
    """Raise `PlanError` naming the setting if the plan does not promise to equal one device."""
    if plan.exempt:
        raise PlanError(
            f"{plan.exempt}: such a plan does not promise to compute what one device computes, so there is nothing to verify. "
            "Verify it without that setting, and compare losses with it."
        )


def _varying_shares(plan: Plan, steps: int) -> list[tuple[int, tuple[int, ...]]]:
    """For plans with measured shares: other shares in every step after the first, since any must be right."""
    if plan.shares != "measured":
        return []
    return [
        (step, tuple(1 + (replica + step) % plan.dp for replica in range(plan.dp)))
        for step in range(1, max(steps, 2))
    ]


def _wrong_operator(trainer: Trainer, job: Job, plan: Plan, dtype: torch.dtype | None) -> list[Cause]:
    """Where a partitioned program is wrong, if there is one."""
    replica = trainer.replicas[0]
    division = replica.engine.division
    if division is None:
        return []
    device = replica.context.device
    (batch,) = first_batches(job, 1, plan.largest_share(job.batch_size)[0])
    model, batch = build_filled_model(job, device, dtype), to_device(batch, device, dtype)
    return [Cause("division", first_wrong_operator(division.first, model, job.loss, batch))]


def _run_steps(trainer: Trainer, dtype: torch.dtype | None, comparison: ComparisonRun | None) -> None:
    """Run all steps. comparison: on rank 0, receives each tensor as it is gathered; no rank keeps one."""
    with ExitStack() as stack:
        observers = [stack.enter_context(_observing(replica)) for replica in trainer.replicas]
        for batch in trainer.batches():
            for turn in turns_of(trainer.job, batch.step):
                _compare_turn(trainer, batch, turn, dtype, observers, comparison)
            trainer.next_step = batch.step + 1


def _compare_turn(
    trainer: Trainer,
    batch: Batch,
    turn: LossTurn,
    dtype: torch.dtype | None,
    observers: Sequence[_ChunkObserver],
    comparison: ComparisonRun | None,
) -> None:
    """Run and compare a step, or one of its turns."""
    first, several = trainer.replicas[0], bool(trainer.job.losses)
    shares = dict(zip(map(id, trainer.replicas), batch.shares, strict=True))
    for replica in trainer.replicas if several else ():
        replica.turn_to(turn)
    for observer in observers:
        observer.chunks = []
    # Not trainer.step, which raises when replicas drift apart: here that belongs into the report.
    with default_dtype(dtype):
        gradients = trainer.together(lambda replica: replica.gradients(batch.step, shares[id(replica)]))
    gradients_of = dict(zip(map(id, trainer.replicas), gradients, strict=True))
    if comparison:
        comparison.begin()
    trainer.together(
        lambda replica: each_gradient(
            replica,
            gradients_of[id(replica)],
            comparison.add_gradient if comparison and replica is first else _ignore,
        )
    )
    chunks = [list(observer.chunks) for observer in observers]
    with default_dtype(dtype):
        result = trainer.together(lambda replica: replica.update(gradients_of[id(replica)]))[0]
    for observer, found in zip(observers, chunks, strict=True):
        observer.chunks = found  # not those of further evaluations, which LBFGS makes
    if comparison:
        comparison.update()
    trainer.together(
        lambda replica: each_of_state(
            replica, comparison.add_state if comparison and replica is first else _ignore
        )
    )
    if trainer.job.average is not None:
        comparison.begin_averages() if comparison else None
        trainer.together(
            lambda replica: each_average(
                replica, comparison.add_average if comparison and replica is first else _ignore
            )
        )
    record = _record(trainer, result, observers, comparison.subsampled if comparison else {})
    if comparison:
        comparison.end(record)


def _ignore(name: str, tensor: Tensor | None) -> None:
    """Tensors are compared on rank 0 alone."""


def _record(
    trainer: Trainer,
    result: StepResult,
    observers: Sequence[_ChunkObserver],
    gradients: Mapping[str, Tensor | None],
) -> StepRecord:
    observer_of = dict(zip(map(id, trainer.replicas), observers, strict=True))
    chunks = trainer.together(
        lambda replica: collect(replica.context.world, _chunks(replica, observer_of[id(replica)]))
    )[0]
    digests = trainer.together(_digests)[0]
    inconsistent = trainer.together(_inconsistencies)[0]
    records = (ChunkRecord.from_dict(chunk) for of_rank in chunks for chunk in of_rank)
    return StepRecord(
        step=result.step, loss=result.loss, weight=result.weight, gradient_norm=result.gradient_norm, gradients=gradients,
        chunks=sorted(records, key=lambda chunk: chunk.index), replicas=[*map(digest_values, digests), *inconsistent], skipped=result.skipped,
    )  # fmt: skip


@dataclass
class _ChunkObserver:
    """An `Observer` of one replica's chunks: what they received and computed in a step."""

    modules: ModuleWatch
    chunks: list[ChunkRecord] = field(default_factory=list[ChunkRecord])
    _draws: list[str] = field(default_factory=list[str])
    _seed: int = 0
    _outputs: tuple[ModuleOutput, ...] = ()

    @contextmanager
    def watch(self, chunk: Chunk, model: nn.Module) -> Iterator[list[str]]:
        """Wraps a chunk's forward and backward; yields the list for the digests of its draws."""
        self._draws, self._seed = [], torch.initial_seed()
        self.modules.start()
        yield self._draws
        self._outputs = self.modules.stop()

    def chunk_done(self, chunk: Chunk, weight: float, loss_sum: float) -> None:
        """Record the chunk."""
        record = ChunkRecord(
            index=chunk.index, samples=chunk.samples, weight=weight, loss_sum=loss_sum, data=digest_values(chunk.data), seed=self._seed,
            draws=tuple(self._draws), modules=self._outputs,
        )  # fmt: skip
        self.chunks.append(record)


@contextmanager
def _observing(replica: Replica) -> Iterator[_ChunkObserver]:
    watch = ModuleWatch(replica.model)
    # Hooks on modules would be compiled with them; what they record only helps to find causes.
    with nullcontext() if replica.plan.compiles else watch.attached():
        replica.scope.observer = observer = _ChunkObserver(watch)
        try:
            yield observer
        finally:
            replica.scope.observer = None


def _chunks(replica: Replica, observer: _ChunkObserver) -> list[dict[str, Any]]:
    """The replica's chunks: recorded on the ranks with tp=0 and, in a pipeline, of the last stage."""
    place = replica.context.place
    speaks = place.tp == 0 and (replica.inner.pp > 1 or place.pp == 0)
    return [chunk.to_dict() for chunk in observer.chunks] if speaks else []


def _owned(replica: Replica) -> Steps[list[float]]:
    """The share of the trainable elements that each rank updates."""
    elements = replica.num_trainable
    mine = sum(part.stop - part.start for part in replica.exchange.owned)
    return (yield from collect(replica.context.world, mine / elements))


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

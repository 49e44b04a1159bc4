"""One rank's training step: its chunks forward and backward, the exchange, the update.

Backward runs on the *sum* of each chunk's loss, which is divided once, by the weight of the whole global batch, so that uneven and
empty shares keep the exact mean: before backward where all ranks know that weight (means over samples), else by `Exchange.finish`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.rank_context import RankContext
from meshloom.comm.windows import windows_of
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.moments.modes import Modes
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.data.measured_shares import Pace
from meshloom.exchange.exchange import Exchange
from meshloom.launch.transport import host_identity
from meshloom.optimizer.bfloat16.lowered import lowered, own_model
from meshloom.optimizer.masters import Masters
from meshloom.optimizer.updater import Updater
from meshloom.parameters.model import trainable
from meshloom.parameters.shards import Shards
from meshloom.parameters.starting_model import StartingModel
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.pipeline.schedules.spans import SpanKind
from meshloom.program.ir.written_parameters import mark_declared
from meshloom.program.store.program_cache import ProgramCache
from meshloom.replica import step_checks
from meshloom.replica.attachments import Attachments
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.exchanges.opening import notes_of
from meshloom.replica.exchanges.sharing import shares_copies
from meshloom.replica.loss_sums import LossSums
from meshloom.telemetry.step_result import StepResult
from meshloom.telemetry.timings import Timings
from meshloom.telemetry.traffic import Traffic


class Gradients(NamedTuple):
    """The result of a step's first half.

    of_owned: gradient of each slice that this rank owns in the exchange; None: unused. loss: mean over the
        global batch of `samples` samples, of which this replica has `chunks`. weight: of the batch. overflowed: whether
        some rank's gradients are not finite, with a loss scale: the step is skipped on all. logged: by the loss,
        means over the global batch by name.
    """

    step: int
    samples: int
    chunks: Sequence[Chunk]
    of_owned: list[Tensor | None]
    loss: float
    weight: float
    overflowed: bool = False
    logged: Mapping[str, float] = {}


class Replica:
    """A replica's model on one rank, or the rank's share of it, with engine, exchange and updater.

    share: whether replicas of a host may have one copy of the parameters in shared memory.
    stored: programs and choices of earlier runs, for the rank that captures. files: directory for the file of
    offloaded optimizer state. resumed: whether a checkpoint gives its state before the first step.
    updates: whether it updates its parameters; a worker of an asynchronous run only computes gradients.
    """

    def __init__(
        self, job: Job, plan: Plan, context: RankContext, *, dtype: torch.dtype | None = None, share: bool = False, updates: bool = True,
        timings: Timings | None = None, stored: ProgramCache | None = None, files: Path | None = None, resumed: bool = False,
    ) -> None:  # fmt: skip
        self.timings, exact = timings or Timings(), None
        if plan.precision != "float32":
            job = lowered(in_precision(job, plan), plan, dtype)
            exact = replace(job, model=own_model(job)) if own_model(job) is not job.model else None
        self.job, self.plan, self.context, self.dtype, self.files = job, plan, context, dtype, files
        self.share, self.updates, self.updating = share, updates, False
        self.replicas = context.groups["dp"]
        self.attached = Attachments()
        self.recorder: Recorder | None = None  # of a pipeline's timeline
        self.arrivals: deque[float] = deque(maxlen=1000)  # when the newest steps waited for the exchange
        self.pace = Pace([self.replicas, context.statistics], context.device) if plan.shares == "measured" else None  # fmt: skip
        self.windows = windows_of(self.replicas) if context.device.type == "cpu" else None
        self.may_share = share and self.windows is not None and shares_copies(plan)
        with self.timings.of("building the model"):
            self.start = StartingModel(
                job,
                plan,
                context,
                dtype,
                exact=exact,
                may_share=self.may_share,
                resumed=resumed,
                host=host_identity(),
            )
        self.model = self.start.model
        self.modes = Modes(self.model)
        step_checks.check_limited(self.model, plan)
        mark_declared(self.model, job.buffers)
        self.named = trainable(self.model)
        step_checks.check_built(job, self.model, self.named, plan)
        self.evaluations = 0  # of the loss in steps so far
        self.num_parameters = sum(each.numel() for each in self.model.parameters())
        self.num_trainable = sum(each.numel() for _, each in self.named)
        self.undo = ExitStack()
        self.undo.enter_context(branches_as_written())
        self.sums = LossSums.of(plan, context.device)
        self.stored = stored
        self.inner = plan  # what its parts run under
        self.engine: Engine
        self.scope: ChunkScope
        self.copied = Traffic()  # at the start
        self.told: list[str] = []
        self.exchange: Exchange
        self.updater: Updater

    def step(self, step: int, chunks: Sequence[Chunk]) -> StepResult:
        """Train on this replica's chunks of global batch `step`."""
        return self.update(self.gradients(step, chunks))

    def gradients(self, step: int, chunks: Sequence[Chunk]) -> Gradients:
        """Forward and backward of this replica's chunks of global batch `step`, and the exchange. Buffers
        change, parameters do not."""
        at = self.attached
        for begin in at.begin:
            begin(step)
        filled = [chunk for chunk in chunks if chunk.samples]
        shape = self.engine.shape(filled, chunks[0].batch)
        self.exchange.begin(shape)
        self.evaluations += 1
        self.sums.begin()
        doing = self.context.activity
        doing.enter("preparing", step)
        with self.modes.training(), ExitStack() as around:
            for context in at.around:
                around.enter_context(context(step))
            self.engine.compute(filled, self.sums, self.recorder)
            for complete in at.chunks_done:
                complete(sum(chunk.samples for chunk in filled))
            self.engine.start(self.sums)
            if not shape.chunks:
                self.exchange.end_chunk()
        doing.enter("exchanging", step)
        self.arrivals.append(time.monotonic())
        self.sums.wait()
        with _span(self, "exchange"):
            gradients = self.exchange.finish(self.sums.divisor(chunks[0].batch))
            for change in at.synced:
                gradients = change(step, gradients)
        total, weight = self.sums.total, self.sums.weight
        if self.sums.are_unlike:
            step_checks.check_groups(self.updater, self.context.world, self.plan.mesh, f"In step {step}")  # fmt: skip
        if self.sums.unknown:
            self.sums.agree_on_names(self.context.world, speaks=self.context.place.tp == 0)
        is_right = weight > 0 and math.isfinite(total) and not self.sums.overflowed
        # optimizers that evaluate the loss themselves turn back from infinite ones
        if not (is_right or self.updating):
            overflow = self.sums.scale if self.sums.overflowed else None
            step_checks.check_finite(partial(self.engine.stages.locate, filled), self.context.world, step, total, weight, overflow)  # fmt: skip
        for check in at.checked:
            check(step)
        return Gradients(
            step=step, samples=chunks[0].batch, chunks=chunks, of_owned=gradients, loss=total / weight, weight=weight,
            overflowed=self.sums.overflowed, logged=self.sums.logged,
        )  # fmt: skip

    def update(self, found: Gradients) -> StepResult:
        """The second half of a step: clip, update, publish the new parameters."""
        step, doing = found.step, self.context.activity
        for see in self.attached.computed:
            see(found)
        doing.enter("updating", step)
        self.updating = True  # until all ranks have updated
        with _span(self, "update"):
            evaluate = partial(_evaluated, self, found)
            norm = self.updater.update(found.of_owned, found.loss, evaluate=evaluate, skip=found.overflowed)  # fmt: skip
        with _span(self, "exchange"):
            if self.exchange.publish():
                self.updater.parameters_changed()
            for follow in self.attached.published:
                follow(found)
        self.updating = False
        doing.enter("between steps", step + 1)
        result = StepResult(
            step=step, loss=found.loss, weight=found.weight, samples=found.samples, asked=self.sums.asked,
            norm=None if norm is None else self.sums.readbacks.read(norm), skipped=found.overflowed, logged=found.logged,
        )  # fmt: skip
        for see in self.attached.updated:
            see(result)
        return result

    @property
    def masters(self) -> Masters | None:
        """Copies in another precision that are updated in place of the parameters."""
        return self.updater.masters if self.updates else None

    @property
    def shards(self) -> Shards:
        """This rank's shards along tp."""
        return self.engine.shards

    @property
    def stage_group(self) -> Group | None:
        """The group along pp; None: size 1."""
        return self.context.groups["pp"] if self.inner.pp > 1 else None

    def notes(self) -> list[str]:
        """Notes for the user before the first step."""
        return [
            *self.start.notes,
            *self.told,
            *self.updater.notes(),
            *self.engine.stages.notes,
            *notes_of(self.exchange),
        ]

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.undo.close()


def _span(replica: Replica, kind: SpanKind) -> AbstractContextManager[None]:
    return replica.recorder.span(kind) if replica.recorder else nullcontext()


def _evaluated(replica: Replica, found: Gradients) -> tuple[list[Tensor | None], float]:
    """The loss and the gradients of the same chunks once more, with their draws, for parameters that an optimizer has
    moved."""
    again = replica.gradients(found.step, found.chunks)
    return again.of_owned, again.loss

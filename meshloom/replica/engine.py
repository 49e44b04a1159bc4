"""What one rank holds of a replica's model, and its chunks forward and backward.

capture, divide, cut -> every rank releases what it does not hold -> buffers, hooks      `open`, `connect`, once
chunks -> actions of this rank's stages -> gradients, sums of losses                     `compute`, in every step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.rank_context import RankContext
from meshloom.comm.simulated import simulated_groups
from meshloom.core.job import LossFunction, NamedParameters
from meshloom.core.moments.current_step import Moment
from meshloom.core.plan import Plan
from meshloom.core.step_shape import StepShape
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Emit, Exchange
from meshloom.exchange.units.unit_gathering import STEP
from meshloom.parameters.pipeline_ownership import PipelineOwnership, held
from meshloom.parameters.replica_check import first_difference_in_replica
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel, take_share
from meshloom.pipeline.runtime.held_parameters import HeldParameters
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.replica.attachments import Attachments
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.gathered_tensors import GatheredTensors
from meshloom.replica.gradient_completion import GradientCompletion
from meshloom.replica.loss_stages import Stages
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.team_sums import TeamSums
from meshloom.telemetry.timings import Timings
from meshloom.telemetry.traffic import ExpectedBytes


class Engine:
    """Of one rank. stages: what computes.

    shards: this rank's shards along tp. parameters: the trainable ones that this rank updates.
    """

    shards: Shards
    ownership: PipelineOwnership  # along pp

    def __init__(self, plan: Plan, context: RankContext, stages: Stages, timings: Timings) -> None:
        self.stages, self.plan, self.context, self._timings = stages, plan, context, timings
        self._has_several, self._last_stage = plan.num_stages > plan.pp, plan.num_stages - 1
        self._pp: Group = context.groups["pp"] if plan.pp > 1 else simulated_groups(1)[0]
        self._tp: Group | None = context.groups["tp"] if plan.tp > 1 else None
        self.team_sums = TeamSums(self._pp, self._tp)
        self._model: nn.Module
        self._scope: ChunkScope
        self._named: dict[str, nn.Parameter] = {}  # all that this rank holds
        self.held: HeldParameters
        self._completion: GradientCompletion
        self._gathered: GatheredTensors

    def open(self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None = None) -> None:
        """Take this rank's share of the full `model` and release the rest; register in `scope` the buffers
        that training writes here.

        unfilled: gives values to the share, as `model` has none yet; parameters get theirs from who opens the
            exchange, which knows what is kept of them. None: the model has its values.
        """
        with self._timings.of("parts and waiting"):
            self._model, self._scope, stages = model, scope, self.stages
            stages.open(model, scope, unfilled)
            self.ownership = PipelineOwnership(stages.holders, self._pp)
            self.ownership.release(model)
            self.shards = Shards(stages.pieces, self._tp)
            take_share(model, self.shards, unfilled, self.context.world)
            scope.statistics = stages.take(model, self.shards)
            self._named = {name: each for name, each in model.named_parameters() if not each.is_meta}
            self._gathered = GatheredTensors(
                model, self.ownership, self.shards, self._pp, self._tp, self.context.device
            )

    @property
    def parameters(self) -> NamedParameters:
        """The trainable ones that this rank updates."""
        return [
            (name, each)
            for name, each in self._named.items()
            if each.requires_grad and self.ownership.owns(name)
        ]

    @property
    def replicated(self) -> Sequence[str]:
        """Names of the parameters that other ranks of the replica hold, too."""
        if self.context.team is None:
            return ()
        return [name for name, _ in self.parameters if name not in self.shards.pieces]

    @property
    def late(self) -> Sequence[str]:
        """Names of the parameters whose gradients are complete at the end of a step, not of a chunk."""
        return [*self.ownership.lent, *self.stages.late]

    @property
    def lent(self) -> Mapping[str, bool]:
        """Names of the parameters and buffers that several ranks along pp hold -> whether this one updates it.
        Of one order on all of them."""
        return {name: self.ownership.owns(name) for name in self.ownership.lent}

    def connect(self, exchange: Exchange) -> ExitStack:
        """Report complete gradients to `exchange` from now on, until the returned stack is closed."""
        parameters = self.parameters
        self._completion = GradientCompletion(
            parameters, self.ownership, self.shards, self.stages.late, exchange.hook
        )
        self.held = HeldParameters(
            self._named, exchange, self.context.readers, in_programs=bool(self.stages.holders)
        )
        return self.stages.connect(parameters, exchange, self.held, self._completion)

    def attach(self, at: Attachments) -> None:
        """What computing needs at the points of a step."""
        self.stages.attach(at)
        if self._completion.completes_late:
            add_up = partial(self.team_sums.add_up, "tp")
            at.chunks_done.append(
                lambda samples: self._completion.finish(self._named, add_up, computed=samples > 0)
            )
        if (rows := self.stages.row_flags) is not None:
            at.chunks_done.append(lambda samples: self._add_rows(rows))

    def shape(self, chunks: Sequence[Chunk], batch: int) -> StepShape:
        """What a step on these non-empty chunks is like, of a batch of so many samples."""
        differ = self._has_several and stages_may_run_differently(self.plan, batch)
        one_by_one = len(chunks) if self.stages.one_by_one else None
        return StepShape(chunks=one_by_one, may_wait=not differ)

    def compute(self, chunks: Sequence[Chunk], sums: LossSums, recorder: Recorder | None) -> None:
        """Forward and backward of this replica's non-empty chunks."""
        activity, stages, units = self.context.activity, self.stages, self.held.units
        most = self.held.most(len(chunks)) if units else len(chunks)
        last = len(chunks) - 1 if self.plan.pp == 1 and not units else None

        def finish(microbatch: int, returned: Any) -> Tensor:
            root = sums.add(returned, chunks[microbatch])
            if microbatch == last:
                self.start(sums)  # they travel beside its backward
            return root

        def around(stage: int, microbatch: int) -> AbstractContextManager[None]:
            return self._scope.forward(chunks[microbatch], stage=stage, observed=stage == self._last_stage)

        activity.follow(stages.prepare(chunks, most, finish, around))
        with units.computing(STEP, idle=not chunks) if units else nullcontext():
            sent = stages.train([activity, recorder] if recorder else [activity])
        if sent:
            self.team_sums.count(sent)

    def start(self, sums: LossSums) -> None:
        """Ends the chunks of `sums`, adds them up over the replica, and starts their sum over replicas, unless it has started: on a communicator
        of its own, as replicas may have started different numbers of sums of gradients."""
        if sums.started:
            return
        sums.close()
        if self._tp and sums.told is not None:
            self.team_sums.add_up("tp", sums.told)
        if self.plan.pp > 1:
            self.team_sums.add_up("pp", sums.sums)  # known to the last stage's rank, zeros on the others
        sums.start(self.context.statistics)

    def computing(self, kind: str, *, idle: bool = False) -> AbstractContextManager[None]:
        """Context of evaluations and other passes: what they need is gathered, where it is
        not kept. All ranks enter and leave it together. kind: of the pass; idle: without computation here."""
        return self.held.computing(kind, idle=idle)

    def evaluate(self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]) -> None:
        """Evaluate `metric` on a batch in evaluation mode; `take` receives the result on the ranks that
        compute it."""
        self.team_sums.count(self.stages.evaluate(batch, metric, moment, take))

    @property
    def borrows(self) -> bool:
        """Whether this rank holds copies of parameters that others own."""
        return bool(self.ownership.lent)

    def refresh_borrowed(self) -> None:
        """After parameters have changed, by an update or otherwise: those of which this rank holds a copy get
        their owners' values."""
        if self.borrows:
            self.ownership.lend(self._named, self.held.apart(self.lent))

    def gather(self, mine: Callable[[Emit], None], take: Emit) -> None:
        """Gather full tensors on the replica's first rank, where `take` receives them one after another; None
        where the owner has none.

        mine: gives this rank's parameters, buffers or gradients by name; the same kind on all ranks.
        """
        self._gathered.gather(mine, take)

    def check_replicated(self) -> str | None:
        """Describes a difference between ranks of the replica that hold the same parameter or buffer; None if
        there is none."""
        if self.context.team is None:
            return None
        mine = {**self.held.kept(), **held(named_buffers(self._model))}
        return first_difference_in_replica(mine, self.shards, self.context.team, self.plan)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over along pp and tp, and within forward and backward along dp."""
        parts = self.team_sums, self.ownership, self._gathered, self.stages
        return sum((each.expected_bytes() for each in parts), ExpectedBytes())

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]] | None:
        """Parameter or buffer -> the ranks along pp that hold it; None without a pipeline."""
        return self.stages.holders if self.plan.pp > 1 else None

    def _add_rows(self, flags: Tensor) -> None:
        for axis in ("tp", "pp"):
            self.team_sums.add_up(axis, flags.clamp_(max=1))


def stages_may_run_differently(plan: Plan, batch: int) -> bool:
    """Whether replicas may run a rank's several stages in different orders in a step on `batch` samples: in different numbers of chunks."""
    sizes, m = plan.sizes(batch), plan.microbatches
    counts = {sum(map(bool, sizes[start : start + m])) for start in range(0, len(sizes), m)}
    return plan.shares == "measured" or len(counts) > 1

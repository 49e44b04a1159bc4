"""A rank of a replica before its first step: its model, its engine, the exchange and the optimizer path, and
the bytes that they should hand over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from meshloom.comm.group import Group
from meshloom.comm.objects import agree, collect
from meshloom.comm.seat import Seat
from meshloom.comm.steps import Steps
from meshloom.comm.windows import windows_of
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.job import Job, NamedParameters
from meshloom.core.modes import Modes
from meshloom.core.plan import Plan
from meshloom.core.timings import Timings
from meshloom.data.pace import Pace
from meshloom.exchange.alone import Alone
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.optimizer.sparse_parameters import make_dense
from meshloom.optimizer.updater import Updater
from meshloom.optimizer.user_optimizer import Made, make_optimizers
from meshloom.parameters import replica_check
from meshloom.parameters.model import build_model, copy_from_first, facts, state_of, trainable
from meshloom.parameters.shards import Shards
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.program.store.stored import Stored
from meshloom.replica import metrics
from meshloom.replica.buffers import batch_norm
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.module_engine import ModuleEngine
from meshloom.replica.program_engine import ProgramEngine
from meshloom.replica.sharing import why_separate
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class PreparedReplica:
    """A model on one rank, or what the rank holds of it.

    share: whether the replicas of a host may have one copy of the parameters, where their ranks can have
        memory in common.
    stored: readings and choices of earlier runs, for the rank that reads.
    updates: whether it updates its parameters; a worker of an asynchronous run only computes gradients.
    """

    def __init__(
        self, job: Job, plan: Plan, seat: Seat, *, dtype: torch.dtype | None = None, share: bool = False, updates: bool = True,
        timings: Timings | None = None, stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self.timings = timings or Timings()
        self.job = job
        self.plan = plan
        self.seat = seat
        self.dtype = dtype
        self._share = share
        self._updates = updates
        self._updating = False
        self.replicas = seat.groups["dp"]
        # the signals that have asked this rank to stop, if ranks agree on that
        self.stop_requests: Sequence[int] | None = None
        self.recorder: Recorder | None = None  # who notes when a pipeline's actions begin and end
        # when each of the newest steps had nothing left to compute before the exchange
        self.arrivals: deque[float] = deque(maxlen=1000)
        self.pace = Pace([self.replicas, seat.statistics], seat.device) if plan.shares == "measured" else None
        with self.timings.of("building the model"):
            self.model = build_model(job, seat.device, dtype)
        self._modes = Modes(self.model)
        if plan.reads:
            make_dense(self.model)  # programs' gradients are
        self.named = trainable(self.model)
        self._num_parameters = sum(each.numel() for each in self.model.parameters())
        self._num_trainable = sum(each.numel() for _, each in self.named)
        self._undo = ExitStack()
        if plan.sync_batch_norm and plan.dp > 1:
            self._undo.enter_context(batch_norm.synchronise_batch_norm(self.model, seat.statistics))
        self._tally = LossSums(seat.device, keeps_own=EXCHANGES[plan.exchange].independent)
        self.engine: Engine = (
            ProgramEngine(job, plan, seat, dtype=dtype, timings=self.timings, stored=stored)
            if plan.reads
            else ModuleEngine(job, plan, seat)
        )
        self.scope = ChunkScope(job, plan, seat, self.model, dtype=dtype)
        self._frozen: NamedParameters = []
        self._copied = Traffic()  # parameters and buffers, at the start
        self._saved = Traffic()  # the exchange's state in checkpoints so far
        self.exchange: Exchange
        self.updater: Updater

    def prepare(self) -> Steps[None]:
        """Make sure all ranks hold the same job, start from rank 0's values, and build what the step
        needs."""
        with self.timings.of("copying values"):  # after who has built it sooner has waited
            yield from agree(self.seat.world, facts(self.job, self.plan, self.model))
            num_bytes = sum(
                tensor.numel() * tensor.element_size() for tensor in state_of(self.model).values()
            )
            for axis in ("tp", "dp", "pp"):
                group = self.seat.groups.get(axis)
                if group is not None and group.size > 1:
                    yield from copy_from_first(self.model, group)
                    self._copied += Traffic.along(axis, broadcast=num_bytes)
        whole = self.named
        yield from self.engine.open(self.model, self.scope)
        self.named = self.engine.parameters
        self._frozen = [
            (name, each)
            for name, each in self.model.named_parameters()
            if not each.requires_grad and not each.is_meta
        ]
        with self.timings.of("optimizer and buffers"):
            made = make_optimizers(self.job, whole) if self._updates else None
            self.exchange = self._open_exchange(made)
            if made:
                self.updater = Updater(
                    self.job, whole, self.exchange, self.shards, self.named, self._stage_group, made,
                )  # fmt: skip
            yield from self.exchange.open()
        self._undo.enter_context(self.engine.connect(self.exchange))

    @property
    def shards(self) -> Shards:
        """What this rank holds along tp of what is divided."""
        return self.engine.shards

    @property
    def _stage_group(self) -> Group | None:
        return self.seat.groups["pp"] if self.plan.pp > 1 else None

    def num_elements(self) -> int:
        """Trainable elements of the whole model."""
        return self._num_trainable

    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""
        return self._num_parameters

    @property
    def readings(self) -> str | None:
        """How often the loss was read, and for which sizes of batches; None: once, or not at all."""
        return self.engine.readings

    def notes(self) -> list[str]:
        """What the user should know before the first step."""
        return [*self.updater.notes(), *self.engine.notes, *self.exchange.notes()]

    def take_notes(self) -> Steps[list[str]]:
        """What the user should be told of buffers, of all ranks of the replica, each once."""
        mine = self.scope.take_notes()
        everyone: list[list[str]] = (yield from collect(self.seat.team, mine)) if self.seat.team else [mine]
        return list(dict.fromkeys(note for notes in everyone for note in notes))

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over along every axis, of all that takes part in its steps."""
        parts = [
            ExpectedBytes(once=self._copied, so_far=self._saved),
            self.engine.expected_bytes(),
            self.exchange.expected_bytes(),
            *(statistics.expected_bytes() for statistics in self.scope.statistics.values()),
        ]
        if self._updates:
            parts.append(self.updater.expected_bytes())
        if self.plan.dp > 1:
            parts += [self._tally.expected_bytes(), replica_check.expected_bytes(self.model)]
            if self.job.evaluate:
                parts.append(metrics.expected_bytes(self.job.evaluate.metrics))
            if self.plan.sync_batch_norm:
                parts.append(batch_norm.expected_bytes(self.model, self.plan.microbatches))
        return sum(parts, ExpectedBytes())

    def close(self) -> None:
        """Take the hooks off the model."""
        self._undo.close()

    def _open_exchange(self, made: Made | None) -> Exchange:
        if made is None:
            return Alone(self.named)
        sparse = self.engine.sparse(made.optimizers)
        setup = Setup(
            plan=self.plan, named=self.named, frozen=self._frozen, group=self.replicas, apart=self.engine.replicated,
            windows=windows_of(self.replicas) if self.seat.device.type == "cpu" else None,
            may_share=lambda: self._share and not sparse.names and not why_separate(made, self.named),
            sparse=sparse.names, kept=sparse.kept, insisted=sparse.insisted,
        )  # fmt: skip
        return setup.open()

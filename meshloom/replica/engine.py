"""The contract of an engine: it computes a replica's chunks on one rank and holds the rank's share of the
model.

    ModuleEngine    runs the user's module as it is; the rank holds all of it          (dp alone)
    ProgramEngine   runs programs captured from the loss; the rank holds some stages along pp, its shard of them along tp

Order of calls: `open`, `parameters`, `connect`; then in every step `run`, and `refresh_borrowed` after its
update; in every turn of it, after `turn_to`, if the job has several losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.tensor_file import Stream
from meshloom.core.job import LossFunction, NamedParameters
from meshloom.core.losses.turns import LossTurn, OwnGradients
from meshloom.core.mesh import Axis
from meshloom.core.moments.current_step import Moment
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Emit, Exchange
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.program.run.compiler import Compiler
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.team_sums import TeamSums
from meshloom.telemetry.traffic import ExpectedBytes
from meshloom.tensor_parallel.division import Division


class Engine(ABC):
    """What computes on one rank. All ranks of a replica have the same kind and call the same methods in the
    same order.

    runs_modules: whether it runs modules of the user's as they are written, which may change what they see; once it is open.
    writes_trained: whether these are known to write trained parameters.
    shards: this rank's shards along tp. division: how the model was sharded; None: it is not. compiler: compiles what
    is computed; None: nothing is. is_unlike_training: whether it was divided or cut in another precision than training is.
    """

    runs_modules: bool = True
    is_unlike_training: bool = False
    writes_trained: bool = False
    shards: Shards
    division: Division | None = None
    compiler: Compiler | None = None

    @abstractmethod
    def open(
        self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None = None, own: OwnGradients | None = None
    ) -> None:  # fmt: skip
        """Take this rank's share of the full `model` and release the rest; register in `scope` the buffers
        that training writes here.

        unfilled: gives values to the share, as `model` has none yet; parameters get theirs from who opens the
            exchange, which knows what is kept of them. None: the model has its values.
        own: which gradients each loss has, in a job of several.
        """

    @property
    @abstractmethod
    def parameters(self) -> NamedParameters:
        """The trainable parameters that this rank updates."""

    @property
    @abstractmethod
    def replicated(self) -> Sequence[str]:
        """Names of the parameters that other ranks of the replica hold, too."""

    @property
    def late(self) -> Sequence[str]:
        """Names of the parameters whose gradients are complete at the end of a step, not of a chunk."""
        return ()

    @property
    def lent(self) -> Mapping[str, bool]:
        """Names of the parameters and buffers that several ranks along pp hold -> whether this one updates it.
        Of one order on all of them."""
        return {}

    team_sums: TeamSums

    def watch_rows(self, tables: Mapping[str, int], device: torch.device) -> None:
        """Called before `connect`: notes the rows of these parameters that a step uses, name -> rows of all of it, unless
        their gradients say so themselves."""
        return

    def used_rows(self, name: str) -> Tensor | None:
        """Which rows of what this rank holds of such a parameter the replica has used in the newest step: bool
        [rows]. None: its gradient is sparse, and says so."""
        return None

    @abstractmethod
    def connect(self, exchange: Exchange) -> ExitStack:
        """Report complete gradients to `exchange` from now on, until the returned stack is closed."""

    @abstractmethod
    def turn_to(self, turn: LossTurn) -> None:
        """In a job of several losses: from now on `run` computes that of this turn."""

    @abstractmethod
    def run(
        self,
        chunks: Sequence[Chunk],
        scope: ChunkScope,
        loss_sums: LossSums,
        recorder: Recorder | None = None,
    ) -> None:
        """Forward and backward of this replica's non-empty chunks. Afterwards gradients are complete and the
        all-reduce of `loss_sums` over the replicas has started."""

    @abstractmethod
    def evaluate(
        self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]
    ) -> None:  # fmt: skip
        """Evaluate `metric` on a batch in evaluation mode; `take` receives the result on the ranks that
        compute it."""

    @abstractmethod
    def add_up(self, axis: Axis, sums: Tensor) -> None:
        """Sum in place over the replica's ranks along pp or tp."""

    @property
    def borrows(self) -> bool:
        """Whether this rank holds copies of parameters that others own."""
        return False

    @abstractmethod
    def refresh_borrowed(self) -> None:
        """After parameters have changed, by an update or otherwise: those of which this rank holds a copy get
        their owners' values."""

    @abstractmethod
    def gather(self, mine: Callable[[Emit], None], take: Emit) -> None:
        """Gather full tensors on the replica's first rank, where `take` receives them one after another; None
        where the owner has none.

        mine: gives this rank's parameters, buffers or gradients by name; the same kind on all ranks.
        """

    @abstractmethod
    def weights(self) -> Stream | dict[str, Any]:
        """The model's full `state_dict` on the replica's first rank, one tensor at a time where it is
        sharded."""

    @abstractmethod
    def locate_nan(self, chunks: Sequence[Chunk], scope: ChunkScope) -> list[Any] | None:
        """Where a step's loss became NaN or infinite, as [stage, text], stage -1 for a parameter; None if not on
        this rank. Reruns the chunks."""

    @abstractmethod
    def check_replicated(self) -> str | None:
        """Describes a difference between ranks of the replica that hold the same parameter or buffer; None if
        there is none."""

    def computing(self, kind: str, *, idle: bool = False) -> AbstractContextManager[None]:
        """Context of evaluations (and of this engine's own passes): what they need is gathered, where it is
        not kept. All ranks enter and leave it together. kind: of the pass; idle: without computation here."""
        return nullcontext()

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over along pp and tp, and within forward and backward along dp."""
        return ExpectedBytes()

    @property
    def readings(self) -> str | None:
        """How often the loss was captured and for which batch sizes; None: at most once."""
        return None

    @property
    def notes(self) -> list[str]:
        """Notes for the user before the first step."""
        return []

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]] | None:
        """Parameter or buffer -> the ranks along pp that hold it; None without a pipeline."""
        return None

    def schedule(self, num_microbatches: int) -> Schedule | None:
        """The pipeline's schedule for so many microbatches; None without a pipeline."""
        return None

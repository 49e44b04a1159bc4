"""The contract of an engine: what a rank computes of its replica's chunks, and what it holds of the model for
that.

    ModuleEngine    runs the user's module as it is; the rank holds all of it          (dp alone)
    ProgramEngine   runs programs captured from the loss; the rank holds some stages along pp, its shard of them along tp

In order: `open`, `parameters`, `connect` to the exchange of those; then for every step `run`, and
`refresh_borrowed` after its update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.checkpoint.tensor_file import Stream
from meshloom.comm.steps import Steps
from meshloom.core.job import LossFunction, NamedParameters
from meshloom.core.mesh import Axis
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Exchange, Give
from meshloom.optimizer.sparse_parameters import Sparse
from meshloom.parameters.shards import Shards
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.loss_sums import LossSums
from meshloom.telemetry.traffic import ExpectedBytes
from meshloom.tensor_parallel.division import Division

TakeTensor = Callable[[str, Tensor | None], None]


class Engine(ABC):
    """How one rank computes. All ranks of a replica have the same kind, and call the same methods in the same
    order.

    shards: what this rank holds along tp of what is divided. division: how that was chosen; None: nothing is.
    """

    shards: Shards
    division: Division | None = None

    @abstractmethod
    def open(self, model: nn.Module, scope: ChunkScope) -> Steps[None]:
        """Decide who holds what of `model`, which is whole, and let go of the rest; tell `scope` which
        buffers training writes here."""

    @property
    @abstractmethod
    def parameters(self) -> NamedParameters:
        """The trainable parameters that this rank updates."""

    @property
    @abstractmethod
    def replicated(self) -> Sequence[str]:
        """Names of those that other ranks of the replica hold too."""

    @abstractmethod
    def sparse(self, optimizers: Sequence[Optimizer]) -> Sparse:
        """Which of them get sparse gradients."""

    @abstractmethod
    def connect(self, exchange: Exchange) -> ExitStack:
        """From now on `exchange` is told of gradients that are complete. Closing what is returned ends it."""

    @abstractmethod
    def run(
        self, chunks: Sequence[Chunk], scope: ChunkScope, tally: LossSums, recorder: Recorder | None = None
    ) -> Steps[None]:
        """Forward and backward of this replica's chunks that have samples. Then gradients are complete, and
        `tally` is on its way over the replicas."""

    @abstractmethod
    def evaluate(self, batch: Any, metric: LossFunction, take: Callable[[Any], None]) -> Steps[None]:
        """What `metric` returns for a batch in evaluation mode, to `take`, on the ranks that have it."""

    @abstractmethod
    def add_up(self, axis: Axis, sums: Tensor) -> Steps[None]:
        """Add `sums` up over the replica's ranks along pp or tp; nothing where there is one."""

    @abstractmethod
    def refresh_borrowed(self) -> Steps[None]:
        """After parameters have changed, by an update or otherwise: those of which this rank holds a copy get
        their owners' values."""

    @abstractmethod
    def gather(self, mine: Callable[[Give], Steps[None]], take: TakeTensor) -> Steps[None]:
        """Hand `take`, on the replica's first rank, whole tensors of all ranks' parts, one after another;
        None where the owner has none.

        mine: gives this rank's parameters and buffers, some of them, or their gradients, by name. The same
            kind on all ranks.
        """

    @abstractmethod
    def weights(self) -> Stream | dict[str, Any]:
        """The model's `state_dict` in whole shapes, one by one where it is divided; all of it on the
        replica's first rank."""

    @abstractmethod
    def locate_nan(self, chunks: Sequence[Chunk], scope: ChunkScope) -> Steps[list[Any] | None]:
        """Where a step's loss became no number, as [stage, text]; None if it was not here. It runs the chunks
        once more."""

    @abstractmethod
    def check_alike(self) -> Steps[str | None]:
        """What is wrong if a parameter or buffer that several ranks of the replica hold whole is not the same
        on all of them."""

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over along pp and tp."""
        return ExpectedBytes()

    @property
    def readings(self) -> str | None:
        """How often the loss was captured, and for which sizes of batches; None: once, or not at all."""
        return None

    @property
    def notes(self) -> list[str]:
        """What the user should know before the first step."""
        return []

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]] | None:
        """Parameter or buffer -> the ranks along pp that hold it; None: there is one rank along pp."""
        return None

    def schedule(self, num_microbatches: int) -> Schedule | None:
        """What the ranks along pp do in a step of so many microbatches; None: there are no stages."""
        return None

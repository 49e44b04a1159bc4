"""The contract of what computes chunks on one rank: its stages of the loss.

    ModuleStages     one stage, the user's module and loss as they are written (`module_stages.py`)
    ProgramStages    stages of programs captured from the loss, of this rank's shard (`program_stages.py`)

Order of calls: `open`, `take`, `connect`, `attach`; then in every step `prepare` and `train`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.pieces import Pieces
from meshloom.core.job import LossFunction, NamedParameters
from meshloom.core.moments.current_step import Moment
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Exchange
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel
from meshloom.pipeline.runtime.held_parameters import HeldParameters
from meshloom.pipeline.runtime.microbatches import Around
from meshloom.pipeline.runtime.run import ActionListener, Sent
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.run.compiler import Compiler
from meshloom.replica.attachments import Attachments
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.gradient_completion import GradientCompletion
from meshloom.telemetry.traffic import ExpectedBytes
from meshloom.tensor_parallel.division import Division

Statistics = Mapping[int, RunningStatistics]  # stage -> the buffers that its forward writes
# microbatch, what the loss returned for it -> where its backward starts
Finish = Callable[[int, Any], Tensor]


class Stages(ABC):
    """All ranks of a replica have the same kind and call the same methods in the same order.

    one_by_one: whether a chunk's backward ends before the next one's forward. fixes_attributes: whether attributes of modules are
    constants of what runs. cut: this rank's programs, as first cut, once it is open; (): none. runs_modules: whether it runs modules of the user's
    as they are written, which may change what they see; once it is open. writes_trained: whether these are known to write trained
    parameters. is_unlike_training: whether it was divided or cut in another precision than training is. division: how the model
    was sharded; None: it is not. compiler: compiles what is computed; None: nothing is.
    """

    one_by_one: bool = True
    fixes_attributes: bool = False
    cut: Sequence[Stage] = ()
    runs_modules: bool = True
    writes_trained: bool = False
    division: Division | None = None
    compiler: Compiler | None = None
    late: Sequence[str] = ()  # parameters whose gradients ranks along tp have in parts until a step's end

    @abstractmethod
    def open(self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None) -> None:
        """Decide what this rank holds of the full `model`. unfilled: gives it values later; None: it has them."""

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter or buffer -> the ranks along pp that hold it, its owner first; {}: one rank, which holds all."""
        return {}

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        """Which rank along tp holds what of a parameter or buffer; those that are not named are replicated."""
        return {}

    @abstractmethod
    def take(self, model: nn.Module, shards: Shards) -> Statistics:
        """`model` is this rank's share now. Returns the buffers that training writes here."""

    @abstractmethod
    def connect(
        self, parameters: NamedParameters, exchange: Exchange, held: HeldParameters, completion: GradientCompletion
    ) -> ExitStack:  # fmt: skip
        """Report gradients from now on, until the returned stack is closed: to `exchange`, or to `completion`, which knows when other ranks'
        parts of them have come. parameters: those that this rank updates."""

    @abstractmethod
    def attach(self, at: Attachments) -> None:
        """What they need at the points of a step."""

    @abstractmethod
    def schedule(self, num_microbatches: int) -> Schedule:
        """For so many microbatches."""

    @abstractmethod
    def prepare(self, chunks: Sequence[Chunk], most: int, finish: Finish, around: Around) -> Sequence[Action]:
        """Before the first action of a step, in which this rank computes these chunks; its actions. most: chunks of the replica that has most.
        finish: called on the last stage. around: the context of a forward."""

    @abstractmethod
    def train(self, listeners: Sequence[ActionListener]) -> Sent:
        """Forward and backward of these chunks; returns what this rank sent."""

    @abstractmethod
    def evaluate(
        self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]
    ) -> Sent:  # fmt: skip
        """A metric of a batch in evaluation mode; returns what this rank sent. take: receives the result on the ranks that compute it."""

    @abstractmethod
    def locate(self, chunks: Sequence[Chunk]) -> list[Any] | None:
        """Where a step's loss became NaN or infinite, as [stage, text], stage -1 for a parameter; None if not on
        this rank. Reruns the chunks."""

    def watch_rows(self, tables: Mapping[str, int], device: torch.device) -> None:  # noqa: B027
        """From now on, notes which rows of these tables, whose sizes are given, a step uses, where their gradients arrive dense."""

    @property
    def row_flags(self) -> Tensor | None:
        """Of every row of these tables, whether this rank used it in the step; None: there are none."""
        return None

    def used_rows(self, name: str) -> Tensor | None:
        """Those of the newest step; None: the gradient arrives sparse."""
        return None

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank handed over within forward and backward along dp."""
        return ExpectedBytes()

    @property
    def readings(self) -> str | None:
        """How often the loss was captured and for which batch sizes; None: at most once."""
        return None

    @property
    def notes(self) -> list[str]:
        """For the user before the first step."""
        return []

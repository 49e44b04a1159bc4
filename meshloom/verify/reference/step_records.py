"""What one step did, as plain data: both sides of a verification write the same records.

A `StepRecord` of the plan and one of the reference are all that comparison and diagnosis look at; neither
knows how the
numbers came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ModuleOutput:
    """One call of one module: the sum, the sum of squares and the number of elements of its floating-point
    output.

    All three add up over the rows of a batch, so that ranks which share a chunk can be compared with a device
    that has all of it.
    """

    name: str
    call: int
    total: float
    square: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Cast:
    """A value that was made less precise than the parameters: to which dtype, and in which module (or
    optimizer)."""

    place: str
    dtype: str
    in_optimizer: bool


@dataclass(frozen=True, kw_only=True)
class ChunkRecord:
    """One microbatch of one replica. Empty chunks have no samples, no draws and no modules.

    index: replica * microbatches + number of the microbatch.
    weight, loss_sum: what the mean loss divides, and by what it is divided after summing.
    data: digest of the batch that the loss received.
    seed: the generator's seed when the forward began.
    draws: digest of every random draw, in order.
    modules: outputs of all modules, in order of execution.
    """

    index: int
    samples: int
    weight: float
    loss_sum: float
    data: str
    seed: int
    draws: tuple[str, ...] = ()
    modules: tuple[ModuleOutput, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ChunkRecord:
        """The inverse of `to_dict`, also after JSON."""
        given: dict[str, Any] = {**values, "draws": tuple(values["draws"])}
        given["modules"] = tuple(ModuleOutput(**output) for output in values["modules"])
        return ChunkRecord(**given)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of all replicas together.

    loss, weight: global mean, and what it was divided by.
    gradient_norm: 2-norm of the whole gradient before clipping.
    gradients: by parameter name, averaged, not clipped, thinned (`mistakes.py`); None where nothing used the
    parameter. Whole tensors are compared as they come, and nobody keeps them.
    chunks: of all replicas, in order of their index; empty ones may be left out.
    replicas: a digest of each replica's parameters after the update.
    casts: reductions of precision that were seen.
    """

    step: int
    loss: float
    weight: float
    gradient_norm: float | None
    gradients: Mapping[str, Tensor | None]
    chunks: Sequence[ChunkRecord]
    replicas: Sequence[str] = ()
    casts: Sequence[Cast] = ()

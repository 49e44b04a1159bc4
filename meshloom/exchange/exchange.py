"""The contract of an exchange: how replicas agree, in terms of what each rank owns.

One rank's step, in order:

    begin(shape)
    for each chunk:  backward -> hook(parameter), as gradients are computed, some into buffer(parameter)
                     end_chunk()
    finish(weight)   -> gradients of what this rank owns, averaged
    (the updater clips and updates what this rank owns)
    publish()        -> all parameters are up to date on all ranks

`begin` never waits for other ranks; what is called within forward and backward does so only if it sends
`each_chunk`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.core.losses.loss_sum import Divisor
from meshloom.core.step_shape import StepShape
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes

# receives the tensor of a parameter, by name; None: the parameter was not used
Emit = Callable[[str, Tensor | None], None]
Ready = Callable[[nn.Parameter], None]
Memory = Literal["whole", "shared", "sliced"]


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of a flattened parameter."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    kept: Tensor | None = None  # the elements, where the parameter itself is not kept

    @property
    def is_full(self) -> bool:
        """Whether these are all elements of the parameter."""
        return self.stop - self.start == self.parameter.numel()

    def data(self) -> Tensor:
        """The elements, flat; they share memory with the parameter, where that is kept."""
        return self.kept if self.kept is not None else self.parameter.data.view(-1)[self.start : self.stop]

    def read(self) -> Tensor:
        """The elements, flat and in their order; a copy where the parameter lies in memory in another one, such as channels_last."""
        in_order = self.kept is not None or self.parameter.is_contiguous()
        return self.data() if in_order else self.parameter.data.reshape(-1)[self.start : self.stop]

    def write(self, values: Tensor) -> None:
        """Puts these elements, flat, in place of those of the parameter, or of what is kept of it."""
        if self.kept is not None or self.parameter.is_contiguous():
            self.data().copy_(values)
            return
        flat = self.parameter.data.reshape(-1)
        flat[self.start : self.stop] = values
        self.parameter.data.copy_(flat.view_as(self.parameter))


@dataclass(frozen=True, kw_only=True, eq=False)
class Ownership:
    """Who updates what, and where parameters lie: the same as long as an exchange lives.

    owned: the slices that this rank updates. owners: the ranks among which every element has exactly one
        owner, of which the first `num_owners` own any; None: this rank owns all elements.
    memory: "whole": this rank has all of its parameters; "shared": `owners` share one copy, so that a write
        on one rank is visible on all; "sliced": it keeps its slices alone (zero=3).
    independent: whether each replica updates its parameters with the mean gradient of its own share.
    each_chunk: whether each chunk's gradients are sent.
    """

    owned: Sequence[Slice]
    owners: Group | None = None
    num_owners: int = 1
    memory: Memory = "whole"
    independent: bool = False
    each_chunk: bool = False


class Exchange(ABC):
    """How the replicas of a job agree on gradients and parameters. Parameters are first read when all ranks
    have made theirs."""

    ownership: Ownership

    @abstractmethod
    def begin(self, shape: StepShape) -> None:
        """Discards the gradients of the previous step."""

    @abstractmethod
    def end_chunk(self) -> None:
        """All gradients of the next of `shape.chunks` have come. A pipeline, and a rank without chunks, call this once, when
        those of the step have, before they wait for other replicas."""

    @abstractmethod
    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        """The buffer into which a gradient may be accumulated without a copy; `.grad` is then that buffer.
        None: `.grad` is an ordinary tensor."""

    @abstractmethod
    def hook(self, parameter: nn.Parameter) -> Ready | None:
        """What to call with this parameter when a backward has completed its `.grad`; None: it stays there.

        It takes `.grad` (of the loss sum, not of the mean), which is not copied where it was computed into
        the parameter's buffer, and starts to send the gradient when it is complete. Pipelines call it once
        the last backward that uses the parameter has ended; if `each_chunk`, once for every chunk, also
        without a gradient.
        """

    @abstractmethod
    def finish(self, weight: Divisor) -> list[Tensor | None]:
        """The gradient of each owned slice, flat and in the order of `owned`: the sum over all chunks divided
        by `weight`.

        The weight is that of the global batch or, where replicas are `independent`, that of this replica's
        share. A weight of exactly 1 costs no division. With a loss scale it is multiplied by that.

        None for a parameter that no chunk on any rank used. Gradients may be sparse
        (`exchange/sparse_gradients.py`).
        """

    @abstractmethod
    def publish(self) -> bool:
        """Makes the owners' updated parameters visible on all ranks; whether these then have other values
        than updates gave them."""

    @abstractmethod
    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        """Passes the full gradients that `finish` returned to `emit`, one by one, on every rank, for
        inspection: where replicas are `independent`, this one's. At most one bucket is gathered at a time."""

    @abstractmethod
    def expected_bytes(self) -> ExpectedBytes:
        """The bytes that this rank hands to collectives of the group of replicas."""

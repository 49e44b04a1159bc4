"""The contract of an exchange: how replicas agree, in terms of what each rank owns.

One rank's step, in order:

    begin_step()
    for each chunk:  backward -> gradient_ready(parameter), as gradients are computed; some are computed into grad_buffer(parameter)
    end_chunks()
    finish(weight)   -> gradients of what this rank owns, averaged
    (the updater clips and updates what this rank owns)
    publish()        -> all parameters are up to date on all ranks
    settle(early=False)

Before the first step: `open()`. `begin_step` never waits for other ranks; what is called within forward and backward does so only if it sends `each_chunk`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.core.losses.loss_scale import Divisor
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

# receives the tensor of a parameter, by name; None: the parameter was not used
Emit = Callable[[str, Tensor | None], None]
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

    owned: the slices that this rank updates. owners: the ranks among which every element has exactly one owner, of which
        the first `num_owners` own any; None: this rank owns all elements.
    memory: "whole": this rank has all of its parameters; "shared": `owners` share one copy, so that a write on one rank is
        visible on all; "sliced": it keeps its slices alone (zero=3).
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
    """How the replicas of a job agree on gradients and parameters.

    The methods that are not abstract are those of an exchange in which every replica makes the same update of
    all parameters.
    """

    ownership: Ownership

    def each_slice(self, *, borrowed: bool = False) -> list[Slice]:
        """What this rank keeps of all parameters, frozen ones too, if it keeps slices. borrowed: also of those that
        others own."""
        return []

    @property
    def inner(self) -> Exchange | None:
        """The exchange of most parameters, where this one is around it."""
        return None

    def open(self) -> None:  # noqa: B027
        """Called once, before the parameters are first read."""

    def turn_to(self, loss: int) -> None:  # noqa: B027
        """In a job of several losses: from now on gradients are of the parameters of the loss of this number, whose
        turn it is in the step."""

    @abstractmethod
    def begin_step(self) -> None:
        """Discards the gradients of the previous step, or of the turn before."""

    def wait_for_nothing(self) -> None:  # noqa: B027
        """Called after `begin_step` where replicas' pipelines differ in this step, so that waits for other
        replicas inside backwards could deadlock."""

    def chunk(self) -> AbstractContextManager[None]:
        """The context of a chunk's backward where chunks are computed one after another: at its end all of
        the chunk's gradients are complete."""
        return nullcontext()

    def end_chunks(self) -> None:  # noqa: B027
        """Called after this rank's last backward of the step, before it waits for other replicas."""

    def begin_last_chunk(self) -> None:  # noqa: B027
        """Called before this rank's last backward of the step: from now on complete gradients may be sent."""

    def grad_buffer(self, parameter: Tensor) -> GradBuffer | None:
        """The buffer into which a gradient may be accumulated without a copy; `.grad` is then that buffer.
        None: `.grad` is an ordinary tensor."""
        return None

    def gradient_ready(self, parameter: nn.Parameter) -> None:  # noqa: B027
        """Accumulates `parameter.grad` (of the loss sum, not of the mean), if there is one, and starts to
        send the gradient when it is complete.

        Called for each chunk when all of the chunk's gradient is there, or once after the last chunk. A
        gradient that was computed into the parameter's grad_buffer is not copied.
        """

    def ready_hook(self, parameter: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """What a hook on this parameter calls: `gradient_ready`, in as few calls as can be."""
        return self.gradient_ready

    @abstractmethod
    def finish(self, weight: Divisor) -> list[Tensor | None]:
        """The gradient of each owned slice, flat and in the order of `owned`: the sum over all chunks divided
        by `weight`.

        The weight is that of the global batch or, where replicas are `independent`, that of this replica's
        share. A weight of exactly 1 costs no division. With a loss scale it is multiplied by that.

        None for a parameter that no chunk on any rank used. Gradients may be sparse
        (`exchange/sparse_gradients.py`).
        """

    def publish(self) -> None:  # noqa: B027
        """Makes the owners' updated parameters visible on all ranks."""

    def publish_bytes(self) -> Traffic:
        """What this rank hands to collectives in a `publish`, where that is always the same."""
        return Traffic()

    @abstractmethod
    def each_gradient(self, gradients: list[Tensor | None], emit: Emit) -> None:
        """Passes the full gradients that `finish` returned to `emit`, one by one, on every rank, for
        inspection. At most one bucket is gathered at a time."""

    def expected_bytes(self) -> ExpectedBytes:
        """The bytes that this rank hands to collectives of the group of replicas."""
        return ExpectedBytes()

    def notes(self) -> list[str]:
        """Messages for the user before the first step."""
        return []

    # --- Where replicas take independent local steps.

    @property
    def settled(self) -> bool:
        """Whether all replicas hold the same parameters. Equal on all ranks."""
        return True

    def settle(self, *, early: bool) -> bool:
        """Makes the parameters equal on all replicas, if that is due or `early`; returns whether parameters
        have changed outside an update."""
        return False

    def show_mean(self) -> Callable[[], None]:
        """Replaces the parameters by their mean over the replicas, until the returned function is called."""
        return lambda: None

    @property
    def state(self) -> Mapping[str, Tensor] | None:
        """The additional tensors that checkpoints save, by parameter and in its shape; {}: none yet. None:
        this exchange never has any."""
        return None

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state`."""
        raise AssertionError("this exchange has no state")

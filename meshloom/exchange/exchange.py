"""The contract of an exchange: how replicas agree, in terms of what each rank owns.

A step of one rank, in order, with other ranks' steps in between (`Steps` yields where it waits for them):

    begin_step()
    for each chunk:  backward -> gradient_ready(parameter), as gradients come out of it; some were computed into room(parameter)
    yield from finish(weight)   -> gradients of what this rank owns, averaged
    (the one optimizer path clips and updates what this rank owns)
    yield from publish()        -> everybody's parameters are up to date
    yield from settle(early=False)

Before the first of them: `yield from open()`.

An exchange never waits in `begin_step` and `gradient_ready`, so that lockstep ranks cannot deadlock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.program.operators.fused_grad_accumulation import Room
from meshloom.telemetry.traffic import ExpectedBytes

# takes a tensor by the name of its parameter; None: it was not used
Give = Callable[[str, Tensor | None], Steps[None]]


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of a flattened parameter."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether this is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()

    def data(self) -> Tensor:
        """The elements themselves, flat, sharing memory with the parameter."""
        return self.parameter.data.view(-1)[self.start : self.stop]


class Ownership(Protocol):
    """What the one optimizer path has to know: what this rank updates, and which ranks update the rest."""

    @property
    def owned(self) -> Sequence[Slice]: ...
    @property
    def owners(self) -> Group | None: ...
    @property
    def num_owners(self) -> int: ...
    @property
    def one_copy(self) -> bool: ...


class Exchange(ABC):
    """How the replicas of one place agree on gradients and parameters.

    What is not abstract is, as it stands here, that of an exchange in which every replica makes the same
    update of everything.
    """

    @property
    @abstractmethod
    def owned(self) -> Sequence[Slice]:
        """What this rank updates. The same length and order for as long as the exchange lives."""

    @property
    def owners(self) -> Group | None:
        """The ranks among which every element has exactly one owner; None: this rank owns everything."""
        return None

    @property
    def num_owners(self) -> int:
        """How many of `owners` own anything: the first ones."""
        return self.owners.size if self.owners is not None else 1

    @property
    def one_copy(self) -> bool:
        """Whether `owners` have one copy of the parameters in common: what is written of them on one rank is
        written on all."""
        return False

    def open(self) -> Steps[None]:
        """Once, before anybody reads parameters."""
        return
        yield

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the last step's gradients."""

    def begin_last_chunk(self) -> None:  # noqa: B027
        """The next backward is this rank's last one of the step: gradients that are ready may travel."""

    def room(self, parameter: Tensor) -> Room | None:
        """Where a gradient may be added up without a copy, `.grad` then being that room; None: in a `.grad`
        like any other."""
        return None

    def gradient_ready(self, parameter: nn.Parameter) -> None:  # noqa: B027
        """Take `parameter.grad`, if there is one (of a sum, not a mean), add it up, and start sending when it
        is complete.

        Called when all of a chunk's gradient is there, or once when all of the last one's is. What lies in
        the parameter's room is not copied.
        """

    @abstractmethod
    def finish(self, weight: Tensor) -> Steps[list[Tensor | None]]:
        """Gradient of each owned slice (flat, same order as `owned`), summed over all chunks and divided by
        `weight` (float64 []).

        The weight is that of the global batch, or of this replica's share where replicas are `independent`.
        One of exactly 1 costs nothing.

        None for a parameter that no chunk of any rank used. Gradients of rows may be sparse
        (`exchange/sparse_gradients.py`).
        """

    def publish(self) -> Steps[None]:
        """Make the owners' updated parameters visible on all ranks."""
        return
        yield

    @abstractmethod
    def each_gradient(self, gradients: list[Tensor | None], give: Give) -> Steps[None]:
        """Give what `finish` returned as whole gradients, one after another, on every rank: for inspection.
        At most a bucket of them is gathered at a time."""

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands to the group of replicas."""
        return ExpectedBytes()

    def notes(self) -> list[str]:
        """What the user should know before the first step."""
        return []

    # --- Where replicas take independent local steps.

    @property
    def independent(self) -> bool:
        """Whether they do: each updates its parameters by the mean gradient of its own share."""
        return False

    @property
    def settled(self) -> bool:
        """Whether all replicas hold the same parameters. Equal on all ranks."""
        return True

    def settle(self, *, early: bool) -> Steps[bool]:
        """Make them hold the same, if that is due or `early`; whether parameters got values that no update
        made."""
        return False
        yield

    def show_mean(self) -> Steps[Callable[[], None]]:
        """Put the mean of the replicas' parameters in their place, until what is returned is called."""
        return lambda: None
        yield

    @property
    def state(self) -> Mapping[str, Tensor] | None:
        """What checkpoints keep of each parameter besides, by its name, in its shape; {}: nothing yet. None:
        nothing ever."""
        return None

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` was."""
        raise AssertionError("nothing is kept of this exchange")

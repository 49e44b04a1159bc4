"""What a step's chunks write of a replica's parameters: untrained ones are refused; trained ones stay where buckets and
optimizers know them, and in the one copy of all replicas of a host are an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.errors import TrainingError
from meshloom.core.job import NamedParameters
from meshloom.program.ir.parameter_writes import LOOK_EVERY, ParameterWrites, untrained_write


class SharedWriteError(TrainingError):
    """Raised on all ranks in the first step, before any update: forwards write the one copy of the parameters that replicas
    of a host have, and with copies of their own each replica writes its own."""


class ChunkWrites:
    """Of one rank.

    frozen: parameters that nothing trains and that count as no buffers. alone: whether a chunk may write them, as there is no other.
    one_copy: whether replicas have one copy of all. moving: trained parameters to which forwards may give other memory.
    """

    def __init__(
        self, frozen: NamedParameters, trained: NamedParameters, *, alone: bool, one_copy: bool, moving: bool
    ) -> None:
        self._frozen, self._one_copy = frozen, one_copy
        self._watched = [*([] if alone else frozen), *(trained if one_copy else [])]
        self._moving = [each for _, each in trained] if moving else []
        self._since_update: ParameterWrites | None = None
        self._steps = 0
        self._written: str | None = None  # in the one copy

    @contextmanager
    def chunks(self) -> Iterator[None]:
        """A context for a step's chunks. Raises `TrainingError` for a parameter that was frozen when the replica was built and
        is not now, and `JobError` for one that is, and is written."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TrainingError(
                    f"{name} was frozen when the Trainer was built and now has requires_grad=True. Build a new Trainer after unfreezing."
                )
        counted = self._since_update or ParameterWrites(self._watched, by_values=False)
        looks = self._watched if self._steps % LOOK_EVERY == 0 else []
        seen = ParameterWrites(looks, by_values=True)
        memory = [each.data for each in self._moving]
        self._steps += 1
        yield
        for parameter, before in zip(self._moving, memory, strict=True):
            if parameter.data_ptr() != before.data_ptr():  # `.data = ...`
                before.copy_(parameter.data)
                parameter.data = before
        written = list(dict.fromkeys([*counted.names(), *seen.names()]))
        frozen = {name for name, _ in self._frozen}
        if untrained := [name for name in written if name in frozen]:
            raise untrained_write(untrained)
        self._written = next(iter(written), None)

    def check_copy(self, world: Group, *, first: bool) -> Steps[None]:
        """Raise an error if the one copy was written: in the `first` step, before any update, `SharedWriteError` on all ranks."""
        if not self._one_copy:
            return
        everyone: list[str | None] = [self._written]
        if first:
            everyone = yield from collect(world, self._written)
        name = next(filter(None, everyone), None)
        if name is not None:
            raise (SharedWriteError if first else TrainingError)(
                f"{name} was changed outside the optimizer (in a forward, a hook or between steps), and all replicas of this host have one copy of it: the change "
                "would be made once by each. Leave it to the optimizer, compute the changed value anew in forward, or let ranks communicate over Gloo "
                "(--transport gloo), where every replica has a copy of its own."
            )

    def updated(self) -> None:
        """All ranks have updated their parameters."""
        if self._one_copy:
            self._since_update = ParameterWrites(self._watched, by_values=False)

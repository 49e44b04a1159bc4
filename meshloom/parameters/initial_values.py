"""Where the values of parameters and buffers come from before the first step: each rank fills what it holds,
one tensor at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.comm import pieces as moves
from meshloom.comm.pieces import Pieces
from meshloom.parameters.construction.recording import RecordedTensors
from meshloom.parameters.construction.replay import Replay
from meshloom.parameters.construction.tape import address


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldTensor:
    """What a rank holds of one parameter or buffer.

    names: all its names in the model. shape: of the full tensor. tensor: memory to be filled, of the shape of
        this rank's piece, or flat. pieces: which rank along tp holds what of it; None: this one holds all.
        rank: this one along tp. span: start and stop of the elements that are held of the flattened piece;
        None: all.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    tensor: Tensor
    pieces: Pieces | None = None
    rank: int = 0
    span: tuple[int, int] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """What is held of the full tensor."""
        piece = whole if self.pieces is None else moves.take(self.pieces, self.rank, whole)
        return piece if self.span is None else piece.reshape(-1)[slice(*self.span)]

    def take(self, whole: Tensor) -> None:
        """Copy what is held of the full tensor."""
        with torch.no_grad():
            self.tensor.copy_(self.of(whole))


class InitialValues(ABC):
    """The values of a model's parameters and buffers at the start."""

    @abstractmethod
    def fill(self, held: Sequence[HeldTensor]) -> None:
        """Sets the values of all `held`, one after another: besides them there is memory for one full tensor
        and what it is computed from."""

    @property
    def initial(self) -> InitialValues:
        """Those that the model is built with, also where something gives it others before the first step."""
        return self

    @property
    @abstractmethod
    def num_drawn(self) -> int:
        """Random numbers drawn so far, those thrown away included."""

    @abstractmethod
    def digest(self) -> str:
        """Equal on ranks that fill a tensor with equal values."""


class Recorded(InitialValues):
    """Values as the job's model function computes and draws them. replay: None: with one device's draws."""

    def __init__(self, recorded: RecordedTensors, replay: Replay | None = None) -> None:
        self._recorded, self._replay = recorded, replay or recorded.replay
        # what the model refers to besides its parameters and buffers, until it is filled
        self._outside = dict(recorded.outside)

    def fill(self, held: Sequence[HeldTensor]) -> None:
        recorded, replay = self._recorded, self._replay
        waiting: dict[int, list[HeldTensor]] = {}
        for each in held:
            waiting.setdefault(recorded.places[each.names[0]].storage, []).append(each)
        outside, self._outside = self._outside, {}
        for number in sorted({*waiting, *outside}, key=replay.first_draw):
            if number in outside:
                replay.values(number, into=outside[number])
                continue
            into = next((found for each in waiting[number] if (found := self._own_memory(each))), None)
            values = replay.values(number, into=into)
            for each in waiting[number]:
                if address(each.tensor.untyped_storage()) != address(values):
                    each.take(recorded.places[each.names[0]].within(values))

    def finish(self) -> None:
        self._recorded.replay.finish()

    @property
    def num_drawn(self) -> int:
        return self._replay.num_drawn

    def digest(self) -> str:
        return self._recorded.tape.digest()

    def _own_memory(self, each: HeldTensor) -> torch.UntypedStorage | None:
        """The tensor's memory, where it lies there as in the construction."""
        place, tensor = self._recorded.places[each.names[0]], each.tensor
        storage = tensor.untyped_storage()
        alike = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype) == (
            place.size,
            place.stride,
            place.offset,
            place.dtype,
        )
        whole = storage.nbytes() == self._recorded.tape.num_bytes[place.storage]
        return storage if alike and whole and tensor.device.type == "cpu" else None


class FromCheckpoint(InitialValues):
    """No values for the tensors called `names`, which a checkpoint gives before the first step; of the others, which it does
    not have, those of `initial`."""

    def __init__(self, names: Container[str], initial: InitialValues) -> None:
        self._names, self._initial = names, initial

    @property
    def initial(self) -> InitialValues:
        return self._initial

    def fill(self, held: Sequence[HeldTensor]) -> None:
        self._initial.fill([each for each in held if not any(name in self._names for name in each.names)])

    @property
    def num_drawn(self) -> int:
        return self._initial.num_drawn

    def digest(self) -> str:
        return self._initial.digest()

"""A model whose tensors have no memory yet, and what gives it to those that a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshloom.core.job import Job, NamedParameters
from meshloom.core.units import format_bytes, format_seconds
from meshloom.parameters.construction.draw_stream import seconds_to_draw
from meshloom.parameters.construction.recording import RecordedTensors, record
from meshloom.parameters.construction.tape import NotRecordableError, Tape
from meshloom.parameters.initial_values import HeldTensor, InitialValues, Recorded
from meshloom.parameters.model import build_model, replace_tensors, state_of
from meshloom.parameters.shards import Shards

LONG_SECONDS = 60.0
MANY_DRAWS = 10**9  # fewer take no minute anywhere


class UnfilledModel:
    """`model` as recorded: its parameters and buffers are on the CPU and have storages of 0 bytes.

    values: what fills them.
    """

    def __init__(self, model: nn.Module, recorded: RecordedTensors, values: InitialValues) -> None:
        self.model = model
        self.values = values
        self.is_filled = False
        self._recorded = recorded

    def fill(self, shards: Shards | None = None) -> None:
        """Gives memory and values to all parameters and buffers that are not on the meta device.

        shards: of sharded ones only this rank's shards are made, which replace them in the model.
        """
        held: list[HeldTensor] = []

        def place(names: list[str], tensor: Tensor) -> Tensor | None:
            if tensor.is_meta or names[0] not in self._recorded.places:
                return None
            pieces = shards.pieces_of(names, tensor) if shards else None
            if pieces is not None and shards is not None:
                shard = torch.empty(pieces.local_shape(shards.rank), dtype=tensor.dtype)
                held.append(HeldTensor(names=tuple(names), shape=pieces.shape, tensor=shard, pieces=pieces, rank=shards.rank))  # fmt: skip
                return shard
            self._allocate(names[0], tensor)
            held.append(HeldTensor(names=tuple(names), shape=tuple(tensor.shape), tensor=tensor))
            return None

        replace_tensors(self.model, place)
        self.values.fill(held)
        self.is_filled = True

    def empty(self, parameters: NamedParameters) -> NamedParameters:
        """Those of the parameters that the model was built with that are not held here. They get memory,
        which takes none as long as nothing is written there: it must not be read."""
        found = [(name, each) for name, each in parameters if not each.untyped_storage().nbytes()]
        for name, each in found:
            self._allocate(name, each)
        return found

    def fill_parameters(self, parameters: NamedParameters) -> None:
        """Gives values to parameters that the model was built with."""
        self.values.fill(
            [HeldTensor(names=(name,), shape=tuple(each.shape), tensor=each) for name, each in parameters]
        )

    def _allocate(self, name: str, tensor: Tensor) -> None:
        if not tensor.untyped_storage().nbytes():
            number = self._recorded.places[name].storage
            tensor.untyped_storage().resize_(self._recorded.tape.num_bytes[number])


def build_unfilled(job: Job, dtype: torch.dtype | None) -> tuple[nn.Module, UnfilledModel | None, str | None]:
    """The job's model on the CPU, without memory; where its construction cannot be recorded, as it is, None, and
    a note for the user."""
    cpu = torch.device("cpu")
    try:
        model, recorded = record(lambda: build_model(job, cpu, dtype))
    except Exception as error:  # whatever it is, if building as usual fails too that error is the one to see
        model = build_model(job, cpu, dtype)
        reason = str(error) if isinstance(error, NotRecordableError) else repr(error)
        num_bytes = sum(each.nbytes for each in state_of(model).values())
        return model, None, (
            f"Every rank builds the whole model ({format_bytes(num_bytes)}) before it lets go of what it does not hold: the model function cannot be "
            f"recorded ({reason})."
        )  # fmt: skip
    return model, UnfilledModel(model, recorded, Recorded(recorded)), _slow(recorded.tape)


def _slow(tape: Tape) -> str | None:
    """A note for the user where the start takes long."""
    if sum(tape.operators[index].drawn.numel for index in tape.draws) < MANY_DRAWS:
        return None
    seconds = seconds_to_draw(tape)
    return None if seconds < LONG_SECONDS else (
        f"The model's initial values take about {format_seconds(seconds)} on every rank: to have one device's values, each draws all random numbers of the "
        "model function and keeps those of the parameters that it holds."
    )  # fmt: skip

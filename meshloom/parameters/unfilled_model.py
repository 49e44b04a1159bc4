"""A model whose parameters have no memory yet, and what gives it and values to those that a rank holds.

fill          what is held of sharded parameters gets its shape, the rest stays as it is
fill_...      what is kept of parameters gets memory, wherever that lies
give_values   all of that gets its values, on one rank of a host after another where they need the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.group import Group
from meshloom.comm.pieces import take
from meshloom.core.job import Job, NamedParameters
from meshloom.core.random import derive, preserved_draws
from meshloom.core.units import format_bytes
from meshloom.parameters.model import build_model, describe_model, replace_tensors, state_of
from meshloom.parameters.pipeline_ownership import held
from meshloom.parameters.shards import Shards
from meshloom.parameters.stand_ins import drawn, stand_in_bytes, standing_in
from meshloom.parameters.values.building import (
    NotDescribableError,
    described,
    give_memory,
    swap_memory,
    without_memory,
)
from meshloom.parameters.values.initial_values import HeldTensor, InitialValues
from meshloom.program.ir.sparse_constants import sparse_attributes
from meshloom.program.ir.written_parameters import named_buffers, written_parameters

T = TypeVar("T")


class UnfilledModel:
    """`model` as described: its parameters get storages of 0 bytes on `device`, where its buffers move.

    describe: the same model once more, with parameters on the meta device. values: what fills it. had: the values of
    parameters that were built with some. lacking: buffers that were built without. lacks_parameters: whether nothing has
    given memory to parameters so far.
    """

    values: InitialValues

    def __init__(self, model: nn.Module, describe: Callable[[], nn.Module], device: torch.device) -> None:
        self.model, self._describe, self._device = model, describe, device
        self.had: dict[str, Tensor] = {}
        self.lacking: set[str] = set()
        self.lacks_parameters = True
        self._shards: Shards | None = None
        self._waiting: list[HeldTensor] = []
        for each in model.parameters():
            if each.is_meta:
                swap_memory(each, without_memory(each, device))
        replace_tensors(model, self._placed)
        for each in list(sparse_attributes(model)):
            each.move(device)

    def _placed(self, names: list[str], tensor: Tensor) -> Tensor | None:
        """A parameter that was built with values, which code outside of the model may know, and a buffer on its device."""
        if isinstance(tensor, nn.Parameter):
            if not tensor.untyped_storage().nbytes():
                return None
            self.had[names[0]] = tensor.data
            return without_memory(tensor, self._device)
        if tensor.is_meta:
            self.lacking.add(names[0])
            return drawn(tensor, derive("stand-in", names[0])).to(self._device)
        return None if tensor.device == self._device else tensor.to(self._device)

    def fill(self, shards: Shards) -> None:
        """Replaces sharded parameters and buffers by this rank's shards of them."""
        self._shards = shards

        def part_of(names: list[str], tensor: Tensor) -> Tensor | None:
            if tensor.is_meta or (pieces := shards.pieces_of(names, tensor)) is None:
                return None
            if not isinstance(tensor, nn.Parameter):
                return take(pieces, shards.rank, tensor).clone(memory_format=torch.contiguous_format)
            shape = torch.empty(pieces.local_shape(shards.rank), dtype=tensor.dtype, device="meta")
            return without_memory(shape, self._device)

        replace_tensors(self.model, part_of)
        for each in held(written_parameters(self.model).items()).values():
            give_memory(each)

    def fill_parameters(self) -> None:
        """Gives memory to the parameters, where no slices of them are kept."""
        self.fill_slices([], ())

    def fill_slices(self, slices: Iterable[tuple[str, int, int, Tensor]], sliced: Collection[str]) -> None:
        """Takes the memory for what is kept of parameters.

        slices: name, start and stop of elements of the flattened parameter as this rank has it, and flat memory
            for them. sliced: names of all parameters of which ranks keep slices; others get memory in full.
        """
        self._waiting += [self._held(name, memory, (start, stop)) for name, start, stop, memory in slices]
        written = written_parameters(self.model)
        for name, each in held(self.model.named_parameters()).items():
            if name not in sliced and name not in written:
                give_memory(each)
                self._waiting.append(self._held(name, each))
        self.lacks_parameters = False

    def fill_copies(self, copies: Iterable[tuple[str, int, int, Tensor]]) -> None:
        """Takes memory that is not the model's: as the slices of `fill_slices`."""
        self._waiting += [self._held(name, memory, (start, stop)) for name, start, stop, memory in copies]

    def give_values(self) -> None:
        """To all that has memory here."""
        waiting, self._waiting = self._waiting, []
        buffers = [self._held(name, each) for name, each in held(named_buffers(self.model)).items()]
        self.values.fill([*waiting, *buffers])

    def with_values(
        self, values: InitialValues, parameters: NamedParameters, function: Callable[[NamedParameters], T]
    ) -> T:
        """What `function` returns for parameters of full shape while they have their values."""
        for _, each in parameters:
            give_memory(each)
        values.fill([HeldTensor(name=name, tensor=each) for name, each in parameters])
        try:
            return function(parameters)
        finally:
            for _, each in parameters:
                each.untyped_storage().resize_(0)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """A context in which parameters have values that are good for a comparison, in less memory, and buffers those that
        they are built with, also where a checkpoint gives them others before the first step."""
        with preserved_draws():
            like = self._describe()
        with standing_in(self.model, like, self._device):
            yield

    @property
    def stand_in_bytes(self) -> int:
        """Bytes that `standing_in` takes for parameters."""
        return stand_in_bytes(self.model)

    def _held(self, name: str, memory: Tensor, span: tuple[int, int] | None = None) -> HeldTensor:
        shards = self._shards
        pieces = shards.pieces.get(name) if shards else None
        rank = shards.rank if shards else 0
        return HeldTensor(name=name, tensor=memory, pieces=pieces, rank=rank, span=span)


def take_share(model: nn.Module, shards: Shards, unfilled: UnfilledModel | None, world: Group) -> None:
    """Makes of a full model what this rank holds. Parameters of one that is not filled yet get their shapes, and
    values later. Collective: raises the same error on all ranks."""
    check_together(world, lambda: unfilled.fill(shards) if unfilled else shards.divide(model))


def build_unfilled(
    job: Job, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, UnfilledModel | None, str | None]:
    """The job's model without the values of its parameters, which will be filled on `device`; where it cannot be built
    so, the model as it is there, None, and a note for the user."""
    found = unfilled_model(lambda: describe_model(job, dtype), device)
    if isinstance(found, UnfilledModel):
        return found.model, found, None
    model = build_model(job, device, dtype)
    num_bytes = sum(each.nbytes for each in state_of(model).values())
    return model, None, (
        f"Every rank builds the whole model ({format_bytes(num_bytes)}) before it lets go of what it does not hold: it cannot be built without the values of its "
        f"parameters ({found})."
    )  # fmt: skip


def unfilled_model(describe: Callable[[], nn.Module], device: torch.device) -> UnfilledModel | str:
    """What `describe` returns, which will be filled on `device`; or why it cannot be built so."""
    try:
        return UnfilledModel(describe(), describe, device)
    except NotDescribableError as error:
        return str(error)


@contextmanager
def comparable(build: Callable[[], nn.Module], device: torch.device) -> Iterator[nn.Module]:
    """A context with what `build` returns on the CPU, and values on `device` that are good for a comparison: in
    little memory, where it can be built without the values of its parameters."""
    found = unfilled_model(lambda: described(build), device)
    if isinstance(found, UnfilledModel):
        with found.standing_in():
            yield found.model
    else:
        yield build().to(device)

"""A model whose tensors have no memory yet, and what gives it to those that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.core.job import Job, NamedParameters
from meshloom.core.units import format_bytes, format_seconds
from meshloom.parameters.construction.draw_stream import seconds_to_draw
from meshloom.parameters.construction.recording import RecordedTensors, record
from meshloom.parameters.construction.tape import NotRecordableError, Tape
from meshloom.parameters.initial_values import HeldTensor, InitialValues, Recorded
from meshloom.parameters.keyed_init import keyed_values
from meshloom.parameters.model import build_model, replace_tensors, state_of
from meshloom.parameters.shards import Shards
from meshloom.parameters.stand_ins import stand_in_bytes, standing_in
from meshloom.program.ir.sparse_constants import sparse_attributes
from meshloom.program.ir.written_parameters import named_buffers

LONG_SECONDS = 60.0
MANY_DRAWS = 10**9  # fewer take no minute anywhere


_SMALL_BYTES = 64  # a number for each tensor, or for none yet


class UnfilledModel:
    """`model` as recorded: its parameters and buffers are on the CPU and have storages of 0 bytes.

    values: what fills them. device: where they are filled. lacks_parameters: whether its parameters are still
        without values, after `fill`.
    """

    def __init__(self, model: nn.Module, recorded: RecordedTensors, device: torch.device) -> None:
        self.model = model
        self.values: InitialValues = Recorded(recorded)
        self.lacks_parameters = True
        self._recorded, self._device = recorded, device
        self._shards: Shards | None = None

    @property
    def is_lazy(self) -> bool:
        """Whether memory that nothing has touched takes none where it is filled, as on CPUs. Elsewhere each tensor is
        made on the CPU and copied."""
        return self._device.type == "cpu"

    def fill(self, shards: Shards | None = None, *, buffers_only: bool = False) -> None:
        """Gives memory and values to all parameters and buffers that are not on the meta device.

        shards: of sharded ones only this rank's shards are made, which replace them in the model. buffers_only:
            parameters get their shapes alone, and values by `fill_parameters` or `fill_slices`, but for those that count
            as buffers.
        """
        self._shards = shards
        buffers = {name for name, _ in named_buffers(self.model)}
        held: list[HeldTensor] = []

        def place(names: list[str], tensor: Tensor) -> Tensor | None:
            if tensor.is_meta or names[0] not in self._recorded.places:
                return None
            pieces = shards.pieces_of(names, tensor) if shards else None
            is_left = buffers_only and isinstance(tensor, nn.Parameter) and names[0] not in buffers
            if pieces is not None and shards is not None:
                shard = torch.empty(pieces.local_shape(shards.rank), dtype=tensor.dtype, device=self._device)
                if is_left:
                    shard.untyped_storage().resize_(0)
                else:
                    held.append(self._held(tuple(names), shard))
                return shard
            if not is_left:
                held.append(self._with_memory(tuple(names), tensor))
            elif not self.is_lazy:
                tensor.data = torch.empty_like(tensor, device=self._device)
                tensor.untyped_storage().resize_(0)
            return None

        replace_tensors(self.model, place)
        self.values.fill(held)
        self.lacks_parameters = buffers_only

    def fill_parameters(self) -> None:
        """Gives memory and values to the parameters that `fill` has left without, where no slices of them are
        kept."""
        self.fill_slices([], ())

    def fill_slices(self, slices: Iterable[tuple[str, int, int, Tensor]], sliced: Collection[str]) -> None:
        """Gives values to what is kept of parameters that `fill` has left without.

        slices: name, start and stop of elements of the flattened parameter as this rank has it, and flat memory
            for them. sliced: names of all parameters of which ranks keep slices; others are filled in full.
        """
        held = [self._held((name,), memory, (start, stop)) for name, start, stop, memory in slices]
        buffers = {name for name, _ in named_buffers(self.model)}
        for name, each in self.model.named_parameters():
            if (
                name not in sliced
                and name not in buffers
                and name in self._recorded.places
                and not each.is_meta
            ):
                held.append(self._with_memory((name,), each))
        self.values.fill(held)
        self.lacks_parameters = False

    def fill_copies(self, copies: Iterable[tuple[str, int, int, Tensor]], shards: Shards) -> None:
        """Gives values to memory that is not the model's: as the slices of `fill_slices`, of what a rank has of each parameter
        by `shards`. The model stays without memory."""
        self._shards = shards
        held: list[HeldTensor] = []
        state = dict(self.model.named_parameters())
        for name, start, stop, memory in copies:
            if name in self._recorded.places:
                held.append(self._held((name,), memory, (start, stop)))
            else:
                memory.copy_(shards.take(name, state[name].detach()).reshape(-1)[start:stop])
        self.values.fill(held)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """A context in which everything has values that are good for a comparison, in less memory: buffers those that they
        are built with, also where a checkpoint gives them others before the first step."""
        given, self.values = self.values, self.values.initial
        try:
            self.fill(buffers_only=True)
        finally:
            self.values = given
        with standing_in(self.model, self._recorded, self._device):
            yield

    @property
    def stand_in_bytes(self) -> int:
        """Bytes that `standing_in` takes for parameters."""
        return stand_in_bytes(self.model, self._recorded)

    @property
    def tape(self) -> Tape:
        """Of its construction."""
        return self._recorded.tape

    @property
    def num_drawn(self) -> int:
        """Random numbers drawn for its values so far."""
        return self.values.num_drawn

    def draw_keyed(self, seed: int) -> None:
        """Values are those of `Job(init="keyed")` from now on."""
        self.values = keyed_values(self._recorded, seed)

    def fill_attributes(self) -> None:
        """Gives values to the tensors that modules refer to besides parameters and buffers."""
        self.values.fill([])

    def finish(self) -> None:
        """Leaves torch's default generator as the construction does."""
        self._recorded.replay.finish()

    def empty(self, parameters: NamedParameters) -> NamedParameters:
        """Those of the parameters that the model was built with that are not held here. Where that takes none, they
        get memory, which must not be read."""
        found = [(name, each) for name, each in parameters if not each.untyped_storage().nbytes()]
        for name, each in found if self.is_lazy else ():
            self._allocate(name, each)
        return found

    def release(self, parameters: NamedParameters) -> None:
        """Takes their memory from them."""
        for _, each in parameters:
            each.untyped_storage().resize_(0)

    def fill_whole(self, parameters: NamedParameters) -> None:
        """Gives memory and values to parameters that the model was built with."""
        for name, each in parameters:
            self._allocate(name, each)
        self.values.fill(
            [HeldTensor(names=(name,), shape=tuple(each.shape), tensor=each) for name, each in parameters]
        )

    def _with_memory(self, names: tuple[str, ...], tensor: Tensor) -> HeldTensor:
        """All of what this rank has of a tensor, where it is to be filled."""
        if not self.is_lazy or (not isinstance(tensor, nn.Parameter) and self._may_be_resized(names)):
            tensor.data = torch.empty_like(tensor, device=self._device)
        elif self._shards and names[0] in self._shards.pieces:
            tensor.untyped_storage().resize_(tensor.nbytes)
        else:
            self._allocate(names[0], tensor)
        return self._held(names, tensor)

    def _may_be_resized(self, names: tuple[str, ...]) -> bool:
        """Whether a buffer, which a forward may resize, is small and alone in its storage: constants have one that
        cannot be resized."""
        number = self._recorded.places[names[0]].storage
        if self._recorded.tape.num_bytes[number] > _SMALL_BYTES:
            return False
        return not any(
            each.storage == number for name, each in self._recorded.places.items() if name not in names
        )

    def _held(
        self, names: tuple[str, ...], memory: Tensor, span: tuple[int, int] | None = None
    ) -> HeldTensor:
        shards = self._shards
        pieces = shards.pieces.get(names[0]) if shards else None
        shape = self._recorded.places[names[0]].size
        rank = shards.rank if shards else 0
        return HeldTensor(names=names, shape=shape, tensor=memory, pieces=pieces, rank=rank, span=span)

    def _allocate(self, name: str, tensor: Tensor) -> None:
        num_bytes = self._recorded.tape.num_bytes[self._recorded.places[name].storage]
        if num_bytes and not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(num_bytes)


def take_share(model: nn.Module, shards: Shards, unfilled: UnfilledModel | None, world: Group) -> Steps[None]:
    """Makes of a full model what this rank holds. Parameters of one that is not filled yet get their shapes, and
    values later, by the exchange. Collective: raises the same error on all ranks."""
    yield from check_together(
        world, lambda: unfilled.fill(shards, buffers_only=True) if unfilled else shards.divide(model)
    )


def build_unfilled(
    job: Job, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, UnfilledModel | None, str | None]:
    """The job's model without memory, which will be filled on `device`; where its construction cannot be
    recorded, the model as it is there, None, and a note for the user."""
    found = record_unfilled(lambda: build_model(job, torch.device("cpu"), dtype), device)
    if isinstance(found, UnfilledModel):
        if job.init == "keyed":
            found.draw_keyed(job.seed)
            return found.model, found, None
        return found.model, found, _slow(found.tape)
    model = build_model(job, device, dtype)
    num_bytes = sum(each.nbytes for each in state_of(model).values())
    return model, None, (
        f"Every rank builds the whole model ({format_bytes(num_bytes)}) before it lets go of what it does not hold: the model function cannot be "
        f"recorded ({found})."
    )  # fmt: skip


def record_unfilled(build: Callable[[], nn.Module], device: torch.device) -> UnfilledModel | str:
    """What `build` returns, without memory, which will be filled on `device`; or why it cannot be recorded."""
    try:
        model, recorded = record(build)
    except NotRecordableError as error:
        return str(error)
    except Exception as error:  # whatever it is, if building as usual fails too that error is the one to see
        return repr(error)
    for each in list(sparse_attributes(model)):
        each.move(device)
    return UnfilledModel(model, recorded, device)


@contextmanager
def comparable(build: Callable[[], nn.Module], device: torch.device) -> Iterator[nn.Module]:
    """A context with what `build` returns on the CPU, and values on `device` that are good for a comparison: in
    little memory, where the construction can be recorded."""
    found = record_unfilled(build, device)
    if isinstance(found, UnfilledModel):
        with found.standing_in():
            yield found.model
    else:
        yield build().to(device)


def _slow(tape: Tape) -> str | None:
    """A note for the user where the start takes long."""
    if sum(tape.operators[index].drawn.numel for index in tape.draws) < MANY_DRAWS:
        return None
    seconds = seconds_to_draw(tape)
    return None if seconds < LONG_SECONDS else (
        f"The model's initial values take about {format_seconds(seconds)} on every rank: to have one device's values, each draws all random numbers of the "
        'model function and keeps those of the parameters that it holds. With Job(init="keyed") each draws what it holds alone; the values are others, then, '
        "on one device, too."
    )  # fmt: skip

"""Gathers full tensors of a replica on its first rank, one at a time: shards along tp, then owners along
pp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.tensor_file import Stream, TensorEntry, widest_first
from meshloom.comm.group import Group
from meshloom.exchange.exchange import Emit
from meshloom.exchange.units.unit_slices import Unit, UnitFlat
from meshloom.exchange.zero_three import ZeroThree
from meshloom.parameters.model import state_of
from meshloom.parameters.pipeline_ownership import PipelineOwnership
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class GatheredTensors:
    """One rank's part of gathering. pp, tp: the groups along these axes; tp None: size 1."""

    def __init__(
        self, model: nn.Module, ownership: PipelineOwnership, shards: Shards, pp: Group, tp: Group | None, device: torch.device
    ) -> None:  # fmt: skip
        self._model, self._ownership, self._shards = model, ownership, shards
        self._pp, self._device = pp, device
        self._gathered = self._sent = 0  # bytes along tp, along pp
        self._moves = tp is None or tp.rank == 0  # whether this rank sends along pp

    def gather(self, mine: Callable[[Emit], None], take: Emit) -> None:
        """As `Engine.gather`."""
        tensors = state_of(self._model)
        names, moves = list(tensors), self._moves

        def emit(name: str, tensor: Tensor | None) -> None:
            if not self._ownership.owns(name):
                return
            if tensor is not None:
                self._gathered += self._shards.gather_bytes(name, tensor.dtype)
                tensor = self._shards.gather(name, tensor.detach())
            if moves and self._pp.rank == 0:
                take(name, tensor)
            elif moves:
                tell(names.index(name), int(tensor is not None))
                if tensor is not None:
                    send(tensor.contiguous())

        def tell(number: int, there: int) -> None:
            send(torch.tensor([number, there], device=self._device))

        def send(tensor: Tensor) -> None:
            work = self._pp.send(tensor, 0)
            self._sent += tensor.nbytes
            work.wait()

        def receive(tensor: Tensor, sender: int) -> Tensor:
            self._pp.recv(tensor, sender).wait()
            return tensor

        mine(emit)
        if moves and self._pp.rank:
            tell(-1, 0)
        for sender in range(1, self._pp.size) if moves and self._pp.rank == 0 else ():
            while True:
                heard = receive(torch.empty(2, dtype=torch.int64, device=self._device), sender)
                number, there = heard.tolist()
                if number < 0:
                    break
                name = names[number]
                like = torch.empty(
                    self._shards.whole_shape(name, tensors[name]),
                    dtype=tensors[name].dtype,
                    device=self._device,
                )
                take(name, receive(like, sender) if there else None)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes so far."""
        return ExpectedBytes(
            so_far=Traffic.along("tp", all_gather=self._gathered) + Traffic.along("pp", send=self._sent)
        )

    def weights(self, sliced: ZeroThree | None = None) -> Stream:
        """As `Engine.weights`. sliced: what has slices of the parameters; then one unit is gathered at a time."""
        if self._pp.size == 1 and sliced is None:
            self._gathered += self._shards.weights_bytes(self._model)
            return self._shards.weights(self._model)
        state = self._model.state_dict(keep_vars=True)
        entries = widest_first(
            [
                TensorEntry(name, self._shards.whole_shape(name, each), TensorEntry.of(name, each).dtype)
                for name, each in state.items()
            ]
        )
        held = _Held(sliced) if sliced is not None else None
        moves = self._moves
        first = moves and self._pp.rank == 0

        def run(take: Callable[[str, Tensor], None]) -> None:
            for each in entries:
                whole: Tensor | None = None
                if self._ownership.owns(each.name):
                    self._gathered += self._shards.gather_bytes(each.name, each.dtype)
                    self._sent += each.num_bytes if moves and self._pp.rank else 0
                    mine = state[each.name]
                    mine = held.full(mine) if held is not None else mine.detach()
                    whole = self._shards.gather(each.name, mine)
                if moves:
                    whole = self._ownership.bring(each.name, whole, each.shape, each.dtype, self._device)
                if first:
                    assert whole is not None
                    take(each.name, whole)

        return Stream(entries=entries if first else [], run=run)


class _Held:
    """What a rank holds of the parameters, full along dp; those of the newest unit stay."""

    def __init__(self, exchange: ZeroThree) -> None:
        self._exchange = exchange
        self._unit: Unit | None = None
        self._flats: dict[int, Tensor] = {}

    def full(self, tensor: Tensor) -> Tensor:
        """A parameter or a buffer."""
        place = self._exchange.gathering.places.get(id(tensor))
        if place is None:
            return tensor.detach()
        unit, part, entry = place
        if unit is not self._unit:
            self._unit = unit
            self._flats.clear()
        if id(part) not in self._flats:
            self._flats[id(part)] = self._exchange.full(part, part.kept)
        return self._flats[id(part)][entry.start : entry.stop].view(entry.parameter.shape)


def weights_of_units(model: nn.Module, exchange: ZeroThree) -> Stream:
    """As `Engine.weights`, where a rank keeps slices of the parameters; one flat tensor of a unit is gathered
    at a time."""
    names: dict[int, list[str]] = {}
    buffers: list[tuple[str, Any]] = []
    for name, each in model.state_dict(keep_vars=True).items():
        if exchange.keeps(each):
            names.setdefault(id(each), []).append(name)
        else:
            buffers.append((name, each.detach() if isinstance(each, Tensor) else each))
    parts: list[UnitFlat | tuple[str, Any]] = [part for unit in exchange.units for part in unit.parts]
    parts = sorted([*parts, *buffers], key=_width)  # as `widest_first`
    entries: list[TensorEntry] = []
    for each in parts:
        if isinstance(each, UnitFlat):
            entries += [
                TensorEntry.of(name, entry.parameter)
                for entry in each.entries
                for name in names.get(id(entry.parameter), ())
            ]
        else:
            entries.append(TensorEntry.of(*each))
    owners = exchange.ownership.owners
    first = owners is not None and owners.rank == 0

    def run(take: Callable[[str, Tensor], None]) -> None:
        for each in parts:
            if not isinstance(each, UnitFlat):
                take(*each) if first else None
                continue
            flat = exchange.full(each, each.kept)
            for entry in each.entries:
                for name in names.get(id(entry.parameter), ()) if first else ():
                    take(name, flat[entry.start : entry.stop].view(entry.parameter.shape))

    return Stream(entries=entries if first else [], run=run)


def _width(each: UnitFlat | tuple[str, Any]) -> int:
    tensor = each.kept if isinstance(each, UnitFlat) else each[1]
    return -tensor.itemsize if isinstance(tensor, Tensor) else 0

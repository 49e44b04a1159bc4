"""Gathers full tensors of a replica on its first rank, one at a time: shards along tp, then owners along
pp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.exchange.exchange import Emit
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

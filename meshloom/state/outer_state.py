"""The outer momentum of DiLoCo in checkpoints: whole tensors under the parameters' names, beside the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.state.layout import Piece
from meshloom.state.optimizer_state import Held, StatePart
from meshloom.state.shards import Shards
from meshloom.state.whole_state import Gathered, whole_pieces


def outer_pieces(
    momentum: Mapping[str, Tensor], shards: Shards, world: Group, device: torch.device, here: Collection[str] | None
) -> Steps[tuple[list[Piece], Gathered | None]]:
    """This rank's pieces of it, and what of them is still to be gathered.

    momentum: of this rank's parameters, or of its parts of them. Every rank of `world` calls it. here: as for `whole_pieces`.
    """
    ready: list[Piece] = []
    parts: list[StatePart] = []
    for name, tensor in momentum.items():
        if name in shards.pieces:
            held = Held(name, nn.Parameter(tensor, requires_grad=False), 0, tensor.numel(), shards.pieces[name].shape, shards=shards)
            parts.append(StatePart(_key(name), held, tensor.reshape(-1)))
        else:
            ready.append(Piece(_key(name), tensor.reshape(-1), 0, tensor.numel(), tuple(tensor.shape)))
    if not shards.pieces:
        return ready, None
    gathered = yield from whole_pieces(parts, shards, None, world, device, here)
    return ready + gathered.pieces, gathered


def load_outer(
    named: Sequence[tuple[str, nn.Parameter]], shards: Shards, read: Callable[[str, int, int], Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """What was saved for these parameters, in the shape of each; empty if the checkpoint has none. read, shapes: as for `Updater.load`."""
    if not all(_key(name) in shapes for name, _ in named):
        return {}
    momentum: dict[str, Tensor] = {}
    for name, parameter in named:
        shape = torch.Size(shapes[_key(name)])
        momentum[name] = shards.take(name, read(_key(name), 0, shape.numel()).view(shape)).to(parameter.device, copy=True)
    return momentum


def _key(name: str) -> str:
    return f"outer/{name}/momentum"

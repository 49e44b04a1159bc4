"""DiLoCo's outer momentum in checkpoints: full tensors under the parameters' names, beside the optimizer's
state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshloom.checkpoint.format import Piece
from meshloom.comm.group import Group
from meshloom.optimizer.gathered_state import GatheredState, gathered_pieces
from meshloom.optimizer.state_pieces import OwnedSlice, StateShard
from meshloom.parameters.shards import Shards

OUTER = "outer/"  # what all its keys begin with


def outer_pieces(
    momentum: Mapping[str, Tensor],
    shards: Shards,
    world: Group,
    device: torch.device,
    here: Collection[str] | None,
    *,
    gather: bool,
) -> tuple[list[Piece], GatheredState | None]:
    """This rank's pieces of it, and what of them is still to be gathered; gather: as for
    `OptimizerState.save`.

    momentum: of this rank's parameters, or of its shards of them. Every rank of `world` calls it. here: as
    for `gathered_pieces`.
    """
    ready: list[Piece] = []
    parts: list[StateShard] = []
    for name, tensor in momentum.items():
        if name in shards.pieces:
            held = OwnedSlice(
                name,
                nn.Parameter(tensor, requires_grad=False),
                0,
                tensor.numel(),
                shards.pieces[name].shape,
                shards=shards,
            )
            parts.append(StateShard(_key(name), held, tensor.reshape(-1)))
        else:
            ready.append(Piece(_key(name), tensor.reshape(-1), 0, tensor.numel(), tuple(tensor.shape)))
    if not gather:
        return ready + [each.piece() for each in parts], None
    if not shards.pieces:
        return ready, None
    gathered = gathered_pieces(parts, shards, None, world, device, here)
    return ready + gathered.pieces, gathered


def outer_loader(
    named: Sequence[tuple[str, nn.Parameter]], shards: Shards, momentum: dict[str, Tensor]
) -> Callable[[str, Tensor], None]:
    """Returns the function that puts a saved key's tensor into `momentum`, in the shape of the parameter;
    keys of other parameters are ignored."""
    of_key = {_key(name): (name, parameter) for name, parameter in named}

    def take(key: str, whole: Tensor) -> None:
        if key in of_key:
            name, parameter = of_key[key]
            momentum[name] = shards.take(name, whole).to(parameter.device, copy=True)

    return take


def _key(name: str) -> str:
    return f"{OUTER}{name}/momentum"

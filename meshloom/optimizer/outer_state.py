"""DiLoCo's outer momentum in checkpoints: full tensors under the parameters' names, beside the optimizer's
state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from meshloom.checkpoint.format import Piece
from meshloom.parameters.shards import Shards

OUTER = "outer/"  # what all its keys begin with


def outer_pieces(momentum: Mapping[str, Tensor], shards: Shards) -> list[Piece]:
    """This rank's pieces of it. momentum: of this rank's parameters, or of its shards of them."""
    found: list[Piece] = []
    for name, tensor in momentum.items():
        shape, held = tuple(tensor.shape), None
        if name in shards.pieces:
            shape, held = shards.pieces[name].shape, shards.pieces[name].held[shards.rank]
        found.append(Piece(_key(name), tensor.reshape(-1), 0, tensor.numel(), shape, held))
    return found


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

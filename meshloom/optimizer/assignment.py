"""What each rank updates of every optimizer's parameters: all of them, slices of its shards, or full
parameters.

    an optimizer that looks at      updates here
    single elements                 this rank's slice (dp) of this rank's shard (tp)
    whole parameters                the parameters that this rank keeps: gradients are sent to one keeper, values back
    all parameters together         all parameters: every rank keeps all of them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.job import NamedParameters
from meshloom.exchange.exchange import Ownership
from meshloom.optimizer.full_from_shards import FullFromShards, GatheredParameter
from meshloom.optimizer.full_from_slices import FullFromSlices, assign_evenly
from meshloom.optimizer.state_pieces import OwnedSlice
from meshloom.optimizer.user_optimizer import UserOptimizers
from meshloom.parameters.shards import Shards


@dataclass(frozen=True, kw_only=True)
class UpdatedParameters:
    """What one rank updates.

    held: by optimizer.
    targets: for each slice that the exchange owns, the parameter whose `.grad` its gradient becomes; None:
        the gradient is sent to a keeper.
    full: parameters that this rank updates as a whole although it owns only slices or shards of them.
    from_slices, from_shards: how gradients reach these, and how updated values return; None: nothing does.
    """

    held: Sequence[Sequence[OwnedSlice]]
    targets: Sequence[nn.Parameter | None]
    full: Sequence[nn.Parameter] = ()
    from_slices: FullFromSlices | None = None
    from_shards: FullFromShards | None = None


def assign_everything(
    user: UserOptimizers, named: NamedParameters, ownership: Ownership
) -> UpdatedParameters:
    """Every rank updates all parameters: the optimizers keep those that they were built with."""
    names = {id(parameter): name for name, parameter in named}
    held = lambda parameter: OwnedSlice(  # noqa: E731
        names[id(parameter)], parameter, 0, parameter.numel(), tuple(parameter.shape)
    )
    return UpdatedParameters(
        held=[
            [held(each) for group in optimizer.param_groups for each in group["params"]]
            for optimizer in user.optimizers
        ],
        targets=[slice_.parameter for slice_ in ownership.owned],
    )


def assign_parts(
    user: UserOptimizers,
    named: NamedParameters,
    local_parameters: NamedParameters,
    ownership: Ownership,
    shards: Shards,
) -> UpdatedParameters:
    """Gives every optimizer what this rank updates in place of its parameters.

    named: the full parameters. local_parameters: what this rank holds of them, under the same names. A
    parameter that is updated as a whole has keepers along dp, to which slices of its shards are sent
    (`FullFromSlices`), and, if it is sharded, keepers along tp, to which the shards are sent
    (`FullFromShards`).
    """
    names, local = {id(parameter): name for name, parameter in named}, dict(local_parameters)
    optimizers, reaches = user.optimizers, user.reaches
    owners, memory, num_owners = ownership.owners, ownership.memory, ownership.num_owners
    assert not (memory == "shared" and "optimizer" in reaches), "every rank would update the one copy"
    here = owners.rank if owners else 0
    full: dict[str, nn.Parameter] = {}
    everywhere: set[str] = set()
    for optimizer, reach in zip(optimizers, reaches, strict=True):
        if reach != "element":
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            # those that are not local belong to other stages
            mine = {names[id(each)]: each for each in parameters if names[id(each)] in local}
            full |= mine
            everywhere |= mine.keys() if reach == "optimizer" else set()
    sizes = {name: each.numel() for name, each in full.items()}
    keepers = _keepers(sizes, everywhere, shards, num_owners) if full else {}
    targets: list[nn.Parameter | None] = [None] * len(ownership.owned)
    kept: list[nn.Parameter] = []

    def slices(parameter: nn.Parameter) -> list[OwnedSlice]:
        name = names[id(parameter)]
        return _slices(name, local.get(name), parameter.shape, ownership, shards, targets)

    def all_of(parameter: nn.Parameter) -> list[OwnedSlice]:
        name = names[id(parameter)]
        along_dp, along_tp = keepers.get(name, ((), ()))
        if here not in along_dp or shards.rank not in along_tp:
            return []
        kept.append(parameter)
        first = along_dp[0] == here and along_tp[0] == shards.rank
        return [OwnedSlice(name, parameter, 0, parameter.numel(), tuple(parameter.shape), first)]

    held = [
        _replace(optimizer, slices if reach == "element" else all_of)
        for optimizer, reach in zip(optimizers, reaches, strict=True)
    ]
    from_slices: FullFromSlices | None = None
    if full and owners is not None:
        from_slices = FullFromSlices(
            [local[name] for name in full], [keepers[name][0] for name in full], ownership.owned, owners, memory=memory,
        )  # fmt: skip
        kept += [local[name] for name in full if here in keepers[name][0] and name in shards.pieces]
    elif full:
        for index, slice_ in enumerate(ownership.owned):
            targets[index] = slice_.parameter if slice_.name in full else targets[index]
    from_shards: FullFromShards | None = None
    # on all ranks or on none, so that all wait equally often
    if any(name in shards.pieces for name in full):
        updated = {each.name for per_optimizer in held for each in per_optimizer}
        gathered = [
            GatheredParameter(
                name=name,
                shard=local[name],
                keepers=keepers[name][1],
                full=full[name] if name in updated else None,
            )
            for name in full
            if name in shards.pieces and here in keepers[name][0]
        ]
        from_shards = FullFromShards(gathered, shards)
    return UpdatedParameters(
        held=held, targets=targets, full=kept, from_slices=from_slices, from_shards=from_shards
    )


def _slices(
    name: str, local: nn.Parameter | None, shape: torch.Size, ownership: Ownership, shards: Shards, targets: list[nn.Parameter | None],
) -> list[OwnedSlice]:  # fmt: skip
    """What this rank owns of a parameter [shape], of which it holds `local`; None: it is another stage's.
    Sets their targets."""
    held: list[OwnedSlice] = []
    for index, slice_ in enumerate(ownership.owned):
        if local is not None and slice_.parameter is local:
            # A slice that is all of its parameter keeps the shape, so that a 0-dim parameter's state looks
            # the same everywhere.
            data = slice_.data().view(local.shape) if slice_.is_full else slice_.data()
            target = nn.Parameter(data, requires_grad=local.requires_grad) if ownership.owners else local
            targets[index] = target
            over = shards if name in shards.pieces else None
            held.append(OwnedSlice(name, target, slice_.start, slice_.stop, tuple(shape), shards=over))
    return held


def _keepers(
    sizes: Mapping[str, int], everywhere: set[str], shards: Shards, num_owners: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ranks along dp and, of those, along tp that update all of a parameter: one rank, or, for what is
    updated `everywhere`, all.

    What is replicated over tp is kept by all ranks along tp.
    """
    everyone = tuple(range(num_owners)), tuple(range(shards.size))
    keepers = dict.fromkeys(everywhere, everyone)
    rest = [name for name in sizes if name not in everywhere]
    replicated = [name for name in rest if name not in shards.pieces]
    for name, rank in zip(
        replicated, assign_evenly([sizes[name] for name in replicated], num_owners), strict=True
    ):
        keepers[name] = (rank,), everyone[1]
    sharded = [name for name in rest if name in shards.pieces]
    ranks = assign_evenly([sizes[name] for name in sharded], num_owners * shards.size)
    for name, rank in zip(sharded, ranks, strict=True):
        keepers[name] = (rank // shards.size,), (rank % shards.size,)
    return keepers


def _replace(optimizer: Optimizer, by: Callable[[nn.Parameter], list[OwnedSlice]]) -> list[OwnedSlice]:
    """Replaces each parameter of an optimizer by what this rank updates of it, with the state that the
    optimizer's constructor made for it (Adagrad's does)."""
    all_held: list[OwnedSlice] = []
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = list(group["params"])
        held = [by(parameter) for parameter in parameters]
        for parameter, pieces in zip(parameters, held, strict=True):
            state = optimizer.state.pop(parameter, None)
            for piece in pieces if state is not None else []:
                optimizer.state[piece.tensor] = {
                    key: _cut(value, parameter, piece) for key, value in (state or {}).items()
                }
        group["params"][:] = [piece.tensor for pieces in held for piece in pieces]
        if "param_names" in group:
            group["param_names"] = [
                name for name, pieces in zip(group["param_names"], held, strict=True) for _ in pieces
            ]
        all_held += [piece for pieces in held for piece in pieces]
    return all_held


def _cut(value: Any, parameter: nn.Parameter, piece: OwnedSlice) -> Any:
    if not isinstance(value, Tensor) or piece.tensor is parameter:
        return value
    if value.ndim == 0 or value.shape != parameter.shape:
        return value.clone()
    return piece.cut(value)

"""Goes on from a directory of `torch.distributed.checkpoint`: each rank reads what it holds, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.json_values import from_json, to_json
from meshloom.checkpoint.resuming import check_together
from meshloom.core.errors import CheckpointError
from meshloom.exchange.zero_three import slices_of
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import loader_of
from meshloom.train.from_torch.torch_checkpoint import TorchCheckpoint


def resume_from_torch(
    replica: Replica,
    directory: Path,
    check: Callable[[Checkpoint], None],
) -> Checkpoint:
    """Loads the checkpoint, unless `check` raises on some rank. All ranks must see the directory."""
    world = replica.context.world
    opened: list[TorchCheckpoint] = []
    check_together(world, lambda: opened.append(TorchCheckpoint(directory)))
    found = opened[0]
    own = {
        "updater": replica.updater.state.values(),
        "seed": replica.job.seed,
        "batch_size": replica.job.batch_size,
        "shares": [],
    }
    checkpoint = found.as_checkpoint(found.values or own)
    check_together(world, lambda: check(checkpoint))
    check_together(world, lambda: _load(replica, found, own))
    return checkpoint


def _load(
    replica: Replica,
    found: TorchCheckpoint,
    own: Mapping[str, Any],
) -> None:
    updater = own["updater"]
    if found.groups:
        updater = {**updater, "optimizers": [_with_groups(each, found) for each in updater["optimizers"]]}
    loader = loader_of(replica, found.as_checkpoint(found.values or {**own, "updater": updater}))
    for name, tensor in replica.model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and _is_held(replica, tensor):
            loader.weight(name, found.weight(name))
    for key, shape in found.keys.items():
        loader.state(key, shape, partial(found.read, key))
    loader.finish()


def _is_held(replica: Replica, tensor: Tensor) -> bool:
    sliced = slices_of(replica.exchange)
    return (sliced is not None and sliced.keeps(tensor)) or not tensor.is_meta


def _with_groups(saved: Mapping[str, Any], found: TorchCheckpoint) -> dict[str, Any]:
    """As if this run had saved it: hyperparameters are the directory's."""
    groups = [
        _group(saved["kind"], from_json(group), names, found)
        for group, names in zip(saved["groups"], saved["names"], strict=True)
    ]
    return {**saved, "groups": [to_json(group) for group in groups]}


def _group(
    kind: str, here: Mapping[str, Any], names: Sequence[str], found: TorchCheckpoint
) -> dict[str, Any]:
    """The settings of the directory's group of these parameters."""
    there = next((each for each in found.groups if names[0] in each["params"]), None)
    if there is None:
        raise CheckpointError(
            f"{found.path} has no group of the optimizer with parameter {names[0]}, which the job's {kind} updates. Resume with the optimizer that was saved."
        )
    other = sorted(set(names) ^ set(there["params"]))
    if other:
        raise CheckpointError(
            f"{found.path} has {other[0]} in another group of the optimizer than the job's {kind}. Resume with the optimizer that was saved."
        )
    missing = next((key for key in here if key not in there and key != "initial_lr"), None)
    if missing is not None:
        raise CheckpointError(
            f"{found.path} is of another optimizer: the job's {kind} has a setting {missing}, which the groups there lack. Resume with the optimizer that was saved."
        )
    return {**here, **{key: value for key, value in there.items() if key in here}}

"""The mean over replicas of an optimizer's state, which replicas that take independent steps save.

Values per element or per row are averaged over the replicas that have them. Step counters, whole numbers and
plain values are those of the first replica that has them. A replica that had no state for a parameter,
because its share did not use it, has the mean afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshloom.checkpoint.json_values import NotPlainError, from_json, to_json
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.errors import JobError
from meshloom.optimizer.state_pieces import OwnedSlice, place_state
from meshloom.telemetry.traffic import Traffic


def average_state(
    optimizer: Optimizer, held: Sequence[OwnedSlice], group: Group, talk: Group, device: torch.device
) -> Traffic:
    """Sets the state to the mean over the ranks of `group`, which all call it with the same parameters in
    `held`; returns the bytes handed over.

    talk: the same ranks, for what they agree on first; not counted. device: of the group's tensors.
    """
    everyone = collect(
        talk, [[index, key, *_facts(optimizer, value)] for index, key, value in _entries(optimizer, held)]
    )
    first: dict[tuple[int, str], tuple[int, Any]] = {}
    holders: dict[tuple[int, str], int] = {}
    for rank, theirs in enumerate(everyone):
        for index, key, *facts in theirs:
            first.setdefault((index, key), (rank, facts))
            holders[index, key] = holders.get((index, key), 0) + 1
    num_bytes = {"all_reduce": 0, "broadcast": 0}
    for (index, key), (rank, (dtype, shape, plain)) in first.items():
        state: dict[str, Any] = optimizer.state[held[index].tensor]
        if dtype is None:
            if key not in state:
                state[key] = place_state(from_json(plain), key, held[index].tensor, optimizer)
            elif isinstance(state[key], Tensor):
                state[key].copy_(from_json(plain))
            else:
                state[key] = from_json(plain)
            continue
        value: Tensor = (
            state[key]
            if key in state
            else torch.zeros(shape, dtype=getattr(torch, dtype), device=held[index].tensor.device)
        )
        if value.is_floating_point():
            mean = value.to(
                device,
                torch.promote_types(value.dtype, torch.float32),
                copy=True,
                memory_format=torch.contiguous_format,
            )
            num_bytes["all_reduce"] += mean.nbytes
            work = group.all_reduce(mean)
        else:
            mean = value.to(device, copy=True, memory_format=torch.contiguous_format)
            num_bytes["broadcast"] += mean.nbytes
            work = group.broadcast(mean, rank)
        work.wait()
        state[key] = value.copy_(mean.div_(holders[index, key]) if value.is_floating_point() else mean)
    return Traffic({"dp": num_bytes})


def _entries(optimizer: Optimizer, held: Sequence[OwnedSlice]) -> list[tuple[int, str, Any]]:
    return [
        (index, key, value)
        for index, each in enumerate(held)
        for key, value in optimizer.state.get(each.tensor, {}).items()
    ]


def _facts(optimizer: Optimizer, value: Any) -> tuple[str | None, list[int], Any]:
    """Dtype and shape of a tensor with dims; of anything else, its value as JSON."""
    if isinstance(value, Tensor) and value.ndim > 0:
        return str(value.dtype).removeprefix("torch."), list(value.shape), None
    try:
        return None, [], to_json(value)
    except NotPlainError as error:
        raise JobError(
            f"{type(optimizer).__name__} cannot be averaged over replicas: in its state, {error}. Keep tensors, numbers and strings there, or use "
            "exchange=all_reduce."
        ) from None

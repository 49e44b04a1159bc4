"""Checks that ranks hold the same bits: each hashes its parameters and buffers, and the hashes are compared,
between replicas and between the ranks of one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.plan import Plan
from meshloom.parameters.digest import digest
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


def first_difference(tensors: Mapping[str, Tensor], replicas: Group) -> tuple[str, int] | None:
    """The first parameter or buffer that differs on a replica from the first replica's, and that replica. All
    replicas hold the same ones, `tensors`, and call it."""
    mine = torch.stack(
        [digest(tensor) for tensor in tensors.values()] or [torch.zeros((), dtype=torch.int64)]
    )
    everyone = mine.new_empty(replicas.size * mine.numel())
    replicas.all_gather(everyone, mine).wait()
    first, *others = everyone.view(replicas.size, -1).tolist()
    for replica, theirs in enumerate(others, 1):
        for name, here, there in zip(tensors or [""], first, theirs, strict=True):
            if here != there:
                return name, replica
    return None


def expected_bytes(tensors: Mapping[str, Tensor]) -> ExpectedBytes:
    """Bytes of `first_difference`."""
    num_hashes = max(1, len(tensors))
    return ExpectedBytes(per_check=Traffic.along("dp", all_gather=8 * num_hashes))


def first_difference_in_replica(
    tensors: Mapping[str, Tensor], shards: Shards, team: Group, plan: Plan
) -> str | None:
    """The error message if a parameter or buffer that is replicated over ranks of the replica, `team`,
    differs between them; None: they are equal. tensors: what this rank keeps of them."""
    mine = {name: int(digest(each)) for name, each in tensors.items() if name not in shards.pieces}
    everyone: list[dict[str, int]] = collect(team, mine)
    first: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            other, known = first.setdefault(name, (rank, value))
            if value != known:
                places = " and ".join(_place(each, plan) for each in (other, rank))
                return f"{name} differs between ranks {places}, which both hold a full copy"
    return None


def _place(rank: int, plan: Plan) -> str:
    """The coordinates of a rank of the replica, as text."""
    pp, tp = divmod(rank, plan.tp)
    return ",".join(f"{axis}={at}" for axis, at in (("pp", pp), ("tp", tp)) if getattr(plan, axis) > 1)

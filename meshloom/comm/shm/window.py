"""Memory of each rank of a group, allocated by it and mapped by all ranks of the host."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.shm.segments import create_file, map_file, open_file, too_little
from meshloom.core.errors import CollectiveError, MeshloomError


class SharedWindow:
    """Memory of each rank of a group, mapped by all of them.

    >>> SharedWindow([torch.zeros(3, dtype=torch.uint8)]).of(0).numel()
    3
    """

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self._memory = tuple(memory)

    def of(self, rank: int) -> Tensor:
        """That rank's memory: uint8 [num_bytes], page-aligned."""
        return self._memory[rank]


def share_memory(
    group: Group,
    processes: Sequence[int],
    members: Sequence[str],
    num_bytes: int,
    owner: int | None,
) -> list[Tensor]:
    """The memory of each rank, uint8 [num_bytes], mapped here; a collective.

    processes, members: process id and name of each rank. owner: the only rank
    that allocates; the others' tensors are empty. None: all ranks do. Raises `CollectiveError` on all ranks
    if one has too little memory or if their sizes differ.
    """
    allocating = range(group.size) if owner is None else [owner]
    problem: MeshloomError | None = None
    descriptor = -1
    try:
        descriptor = create_file(num_bytes if group.rank in allocating else 0, backed=True)
    except (CollectiveError, OSError) as error:
        problem = error if isinstance(error, CollectiveError) else too_little(num_bytes)
    replies = torch.empty(2 * group.size, dtype=torch.int64)
    group.all_gather(replies, torch.tensor([descriptor, num_bytes])).wait()
    numbers, sizes = replies.view(group.size, 2).T.tolist()
    if problem:
        raise problem
    try:
        if -1 in numbers:
            raise CollectiveError(
                f"{members[numbers.index(-1)]} has too little memory for a window of {num_bytes} bytes."
            )
        if len(set(sizes)) > 1:
            raise CollectiveError(
                f"The ranks request windows of different sizes, {sizes} bytes: all must request the same."
            )
        memory: list[Tensor] = []
        for other in range(group.size):
            if other not in allocating:
                memory.append(torch.empty(0, dtype=torch.uint8))
                continue
            opened = (
                descriptor if other == group.rank else open_file(processes[other], numbers[other], num_bytes)
            )
            memory.append(map_file(opened, num_bytes))
            if other != group.rank:
                os.close(opened)
        group.barrier().wait()
    finally:
        os.close(descriptor)
    return memory

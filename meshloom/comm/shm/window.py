"""Memory of every rank of a group that all ranks of one host map: asked for, opened by all, and only then in
use."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.shm.segments import Files, map_file, too_little
from meshloom.core.errors import CollectiveError, MeshloomError


class SharedWindow:
    """Memory of every rank of a group that all ranks have mapped.

    >>> SharedWindow([torch.zeros(3, dtype=torch.uint8)]).of(0).numel()
    3
    """

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self._memory = tuple(memory)

    def of(self, rank: int) -> Tensor:
        """That rank's part (uint8 [num_bytes], aligned to a page)."""
        return self._memory[rank]


def share_memory(
    group: Group,
    files: Files,
    processes: Sequence[int],
    members: Sequence[str],
    num_bytes: int,
    owner: int | None,
) -> list[Tensor]:
    """Map `num_bytes` of every rank, or of `owner` alone, whose others are empty: uint8 tensors in order of
    ranks. All ranks call it together.

    files: how memory is shared. processes, members: of the ranks, their process ids and what to call them.
    Raises `CollectiveError` on all ranks if one has too little memory or if they ask for different sizes.
    """
    givers = range(group.size) if owner is None else [owner]
    problem: MeshloomError | None = None
    descriptor = number = -1
    try:
        descriptor, number = files.create(num_bytes if group.rank in givers else 0, backed=True)
    except (CollectiveError, OSError) as error:
        problem = error if isinstance(error, CollectiveError) else too_little(files.where, num_bytes, None)
    answers = torch.empty(2 * group.size, dtype=torch.int64)
    group.all_gather(answers, torch.tensor([number, num_bytes])).wait()
    numbers, sizes = answers.view(group.size, 2).T.tolist()
    if problem:
        raise problem
    try:
        if -1 in numbers:
            raise CollectiveError(
                f"{members[numbers.index(-1)]} has too little memory for a window of {num_bytes} bytes."
            )
        if len(set(sizes)) > 1:
            raise CollectiveError(
                f"The ranks ask for windows of different sizes, {sizes} bytes: all must ask for the same."
            )
        memory: list[Tensor] = []
        for other in range(group.size):
            if other not in givers:
                memory.append(torch.empty(0, dtype=torch.uint8))
                continue
            opened = (
                descriptor if other == group.rank else files.open(processes[other], numbers[other], num_bytes)
            )
            memory.append(map_file(opened, num_bytes))
            if other != group.rank:
                os.close(opened)
        group.barrier().wait()
    finally:
        files.all_have_opened(number)
        os.close(descriptor)
    return memory

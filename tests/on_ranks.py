"""Programs of ranks that are run together: simulated ranks, each forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.random import seed_everything
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program

State = Mapping[str, Tensor]


def run_on_ranks(
    programs: Sequence[Program],
    parameters: Sequence[State],
    buffers: Sequence[State],
    batch: Any,
    backward: Callable[[int, Any], None],
    *,
    seed: int,
    dtype: torch.dtype | None = None,
    visit: Callable[[int, Node, Any], None] | None = None,
) -> list[Any]:
    """What the loss returns on every rank. parameters, buffers: rank -> its shards by name. backward: of a rank's result, on that rank. visit: called with
    the rank, every node and its value."""
    groups = simulated_groups(len(programs))

    def run(rank: int) -> Any:
        seed_everything(seed)
        seen = partial(visit, rank) if visit else None
        returned = run_program(
            programs[rank],
            parameters[rank],
            buffers[rank],
            batch,
            dtype=dtype,
            visit=seen,
            group=groups[rank],
        )
        backward(rank, returned)
        return returned

    return in_turns([lambda rank=rank: run(rank) for rank in range(len(programs))])

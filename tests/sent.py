"""What ranks send in a step, as a divided program is said to and as they do over simulated groups, which run
one after another's turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.comm.pieces import place, take
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.random import seed_everything
from meshloom.program.run.execute import run_program
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.sent_bytes import bytes_per_step, sent_at_step_end, sent_in_chunk
from tests.division import SEED

Sent = list[dict[str, tuple[int, int]]]  # rank -> kind of collective -> calls and bytes


def predicted(part: Partition) -> Sent:
    """As the program says."""
    found: Sent = []
    for rank in range(part.choice.num_ranks):
        sent = [*sent_in_chunk(part.programs[rank], rank), *sent_at_step_end(part)]
        calls = {each.collective: sum(other.collective == each.collective for other in sent) for each in sent}
        found.append(
            {kind: (calls[kind], num_bytes) for kind, num_bytes in bytes_per_step(part, rank=rank).items()}
        )
    return found


def counted(part: Partition, model: nn.Module, batch: Any, loss: Tensor | None = None) -> Sent:
    """As the ranks do, for a chunk and the sum at the end. loss: one device's, which is theirs."""
    groups = [RecordedGroup(group, "tp") for group in simulated_groups(part.choice.num_ranks)]

    def run(rank: int) -> None:
        parameters = {
            name: take(part.parameters[name], rank, each.detach()).clone().requires_grad_(each.requires_grad)
            for name, each in model.named_parameters()
        }
        buffers = {name: take(part.buffers[name], rank, each).clone() for name, each in model.named_buffers()}
        seed_everything(SEED)
        returned = run_program(part.programs[rank], parameters, buffers, batch, group=groups[rank])
        found = returned[0] if isinstance(returned, tuple) else returned
        # float64: sums in another order
        assert loss is None or found.item() == pytest.approx(loss.item(), rel=1e-10)
        found.backward()
        if part.summed:
            gradients = [(part.parameters[name], parameters[name].grad) for name in part.summed]
            groups[rank].all_reduce(
                torch.cat(
                    [place(pieces, rank, each).reshape(-1) for pieces, each in gradients if each is not None]
                )
            ).wait()

    in_turns([lambda rank=rank: run(rank) for rank in range(part.choice.num_ranks)])
    return [{name: (count.calls, count.bytes) for name, count in group.counts.items()} for group in groups]

"""Ranks start with the same values: rank 0's, where they have made others."""

from __future__ import annotations

import torch
from torch import nn

from meshloom.comm.objects import collect, first_unlike
from meshloom.core.errors import TrainingError
from meshloom.loops.loop_lines import say
from meshloom.loops.ranks import LoopRanks
from meshloom.parameters.digest import digest


def start_alike(module: nn.Module, ranks: LoopRanks) -> None:
    """Parameters and buffers of all ranks get rank 0's values, and a line says so where they had others. Raises `TrainingError` unless all ranks have made
    the same module."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = {name: [list(each.shape), str(each.dtype), int(digest(each.detach()))] for name, each in tensors}
    everyone = collect(ranks.everyone, mine)
    kind = type(module).__name__
    shapes = [{f"{name} of {kind}": each[:2] for name, each in theirs.items()} for theirs in everyone]
    if found := first_unlike(shapes, lambda each: f"{each[0]} {each[1]}"):
        raise TrainingError(
            f"Ranks have made different modules: {found} on rank 0. What the script makes may not depend on the process."
        )
    unlike = [name for name, _ in tensors if any(each[name][2] != everyone[0][name][2] for each in everyone)]
    for name, each in tensors:
        if name in unlike:
            sent = each.detach().to("cpu").contiguous().clone()
            ranks.everyone.broadcast(sent, 0).wait()
            with torch.no_grad():
                each.copy_(sent)
    if unlike:
        say(
            f"{len(unlike)} tensors of {kind} differed between ranks, like {unlike[0]}; all start with rank 0's"
        )

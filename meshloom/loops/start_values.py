"""Ranks start with the same values: rank 0's, where they have made others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshloom.comm.objects import collect
from meshloom.core.errors import TrainingError
from meshloom.loops.loop_lines import say
from meshloom.loops.ranks import LoopRanks
from meshloom.parameters.digest import digest


def start_alike(module: nn.Module, ranks: LoopRanks) -> None:
    """Parameters and buffers of all ranks get rank 0's values, and a line says so where they had others."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = {name: [list(each.shape), str(each.dtype), _digest(each)] for name, each in tensors}
    everyone = collect(ranks.everyone, mine)
    agree_on_shapes(everyone, type(module).__name__)
    unlike = [name for name, _ in tensors if any(each[name][2] != everyone[0][name][2] for each in everyone)]
    for name, each in tensors:
        if name in unlike:
            sent = each.detach().to("cpu").contiguous().clone()
            ranks.everyone.broadcast(sent, 0).wait()
            with torch.no_grad():
                each.copy_(sent)
    if unlike and ranks.world.main:
        say(
            f"{len(unlike)} tensors of {type(module).__name__} differed between ranks, like {unlike[0]}; all start with rank 0's"
        )


def agree_on_shapes(everyone: list[dict[str, list[object]]], kind: str) -> None:
    """Raises `TrainingError` unless all ranks have made the same module."""
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in [*first, *(each for each in theirs if each not in first)]:
            here, there = (
                f"{known[name][0]} {known[name][1]}" if name in known else "missing"
                for known in (theirs, first)
            )
            if here != there:
                raise TrainingError(
                    f"Ranks have made different modules: {name} of {kind} is {here} on rank {rank} and {there} on rank 0. "
                    "What the script makes may not depend on the process."
                )


def _digest(tensor: Tensor) -> int:
    return int(digest(tensor.detach()))

"""The benchmark GPT through torch.distributed.pipelining: blocks dealt out by hand, as its tutorial has
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpt import SMALL, Size, make_model
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

# The fastest cuts at blocks, by their number and that of the stages: the head and the loss take about as long
# as half a block of the small size, and as four and a half of GPT-2's.
BLOCKS = {(6, 2): (3, 3), (6, 4): (2, 2, 1, 1), (12, 2): (8, 4)}
SCHEDULES: dict[str, type[Any]] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,
    "zb-v": schedules.ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    """A run of the GPT's blocks, with what comes before the first and after the last."""

    def __init__(
        self, whole: Any, first_block: int, num_blocks: int, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.token, self.position = (whole.token, whole.position) if is_first else (None, None)
        self.blocks = nn.ModuleList(list(whole.blocks)[first_block : first_block + num_blocks])
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, length] or [batch, length, width] -> [batch, length, width] or logits."""
        if self.token:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head else x


def open_pipelining(
    name: str,
    num_microbatches: int,
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    size: Size = SMALL,
) -> Callable[[Tensor], float]:
    """Steps of this rank under a schedule: of tokens [batch, length + 1]; the mean loss where the last stage
    is, else 0."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    kind = SCHEDULES[name]
    per_rank = 2 if name in ("interleaved", "zb-v") else 1
    count = num_ranks * per_rank
    mine = {"zb-v": (rank, count - 1 - rank)}.get(name, tuple(range(rank, count, num_ranks)))
    whole, blocks = make_model(size), BLOCKS[size.blocks, count]
    parts = [
        Part(whole, sum(blocks[:stage]), blocks[stage], is_first=stage == 0, is_last=stage == count - 1)
        for stage in mine
    ]
    stages = [
        PipelineStage(part, stage, count, torch.device("cpu"))
        for part, stage in zip(parts, mine, strict=True)
    ]
    single = name in ("gpipe", "1f1b")
    schedule = kind(stages[0] if single else stages, num_microbatches, loss_fn=cross_entropy)
    optimizer = make_optimizer(
        [
            (f"{stage}.{key}", each)
            for part, stage in zip(parts, mine, strict=True)
            for key, each in part.named_parameters()
        ]
    )

    def step(tokens: Tensor) -> float:
        optimizer.zero_grad()
        inputs = (tokens[:, :-1],) if 0 in mine else ()
        if count - 1 in mine:
            losses: list[Tensor] = []
            schedule.step(*inputs, target=tokens[:, 1:], losses=losses, return_outputs=False)
            value = torch.stack(losses).mean().item()
        else:
            schedule.step(*inputs, return_outputs=False)
            value = 0.0
        optimizer.step()
        return value

    return step


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

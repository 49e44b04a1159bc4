"""A job that trains in a pipeline until it is killed, and whose loss does on request what a user's mistake
does: hang.

While the file that MESHLOOM_TESTS_TROUBLE names holds "RANK KIND", that rank loops for ever in the loss, or
is slow once and goes on.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.jobs import make_job


@torch.library.custom_op("meshloom_tests::trouble", mutates_args=())
def trouble(x: Tensor) -> Tensor:
    file = Path(os.environ.get("MESHLOOM_TESTS_TROUBLE", "/"))
    with suppress(FileNotFoundError, IsADirectoryError):
        rank, kind = file.read_text().split()
        if int(rank) == torch.distributed.get_rank():
            while kind == "loop":
                pass
            file.unlink()
            time.sleep(float(kind))
    return x.clone()


@trouble.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


trouble.register_autograd(lambda ctx, gradient: gradient)


class Layers(nn.Module):
    """[batch, 7] -> [batch, 5], through layers that are alike; each may be in trouble."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(trouble(x)))
        return self.head(x)


job = replace(make_job("mlp", "adamw"), model=Layers, batch_size=16, steps=1_000_000, checkpoint_every=10)

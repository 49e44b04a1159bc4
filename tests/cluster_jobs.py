"""A GPT whose operations can be counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshloom.core.job import Job

WIDTH, HEADS, BLOCKS, LENGTH, TOKENS = 64, 8, 6, 48, 160


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.n1(x)).chunk(3, -1)
        )
        read = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """Plain, with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def _data() -> list[Any]:
    ids = torch.arange(LENGTH) % TOKENS
    return [{"ids": ids, "next": ids}] * 64


job = Job(
    model=GPT,
    data=_data,
    loss=_loss,
    optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
    batch_size=32,
    steps=100,
)


def products(samples: int) -> int:
    """FLOPs of a forward: 24 b s h^2 + 4 b s^2 h in a block (Narayanan et al., 2021, appendix), and the head."""
    block = 24 * samples * LENGTH * WIDTH**2 + 4 * samples * LENGTH**2 * WIDTH
    return BLOCKS * block + 2 * samples * LENGTH * WIDTH * TOKENS

"""Small models that the tests of choices divide: name -> (build, loss, batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from program_jobs import job_of
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.program.capture.shapes import capture_shapes
from meshloom.tensor_parallel.layout.layout import Layout, layout_of
from meshloom.tensor_parallel.rules.table import BUILT_IN

LENGTH, WIDTH, VOCABULARY = 6, 16, 30


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, WIDTH // heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, count * size) for count in (heads, kv_heads, kv_heads))
        self.out = nn.Linear(heads * size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (each(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for each in (self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two linear layers, each with a norm before and a sum after."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.first, self.attention, self.second = (
            nn.LayerNorm(WIDTH),
            Attention(heads, kv_heads),
            nn.LayerNorm(WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Tokens [b, s] -> logits [b, s, v]."""

    def __init__(self, *, heads: int = 4, kv_heads: int = 4, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, kv_heads) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    """Images [b, 3, 8, 8] -> [b, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.Conv2d(12, 8, 3),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))


def next_token(model: Any, batch: Any) -> Tensor:
    """The mean loss of the next token."""
    logits = model(batch["x"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())


def square(model: Any, batch: Any) -> Tensor:
    """The mean square of the output."""
    return model(batch["x"]).square().mean()


def tokens(size: int = 3) -> dict[str, Tensor]:
    """Token numbers [size, LENGTH + 1]."""
    return {"x": torch.randint(VOCABULARY, (size, LENGTH + 1), generator=torch.Generator().manual_seed(0))}


def normal(*shape: int) -> dict[str, Tensor]:
    """Normal numbers."""
    return {"x": torch.randn(shape, generator=torch.Generator().manual_seed(0))}


def layout_by_shapes(
    build: Callable[[], nn.Module], loss: Callable[[Any, Any], Tensor], batch: Any
) -> Layout:
    """The layout of a job's program."""
    return layout_of(capture_shapes(job_of(build, loss), batch), BUILT_IN)

"""The benchmark GPT and its data, in two sizes: separate q, k, v."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model and of its samples. tied: the head's weight is the embedding's."""

    vocabulary: int
    width: int
    blocks: int
    heads: int
    length: int
    tied: bool


SMALL = Size(vocabulary=2000, width=384, blocks=6, heads=6, length=128, tied=False)  # 12.2 million parameters
# 124 million parameters
GPT2 = Size(vocabulary=50257, width=768, blocks=12, heads=12, length=1024, tied=True)


class Block(nn.Module):
    """[batch, length, width] -> the same."""

    def __init__(self, size: Size = SMALL) -> None:
        super().__init__()
        width, self.head_width = size.width, size.width // size.heads
        self.attention_norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        # Heads are counted by their size, so that a peer that cuts q, k and v by hand finds its own number of
        # them.
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, size: Size = SMALL) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            nn.init.normal_(self.token.weight, std=0.02)
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(size: Size = SMALL) -> GPT:
    """The same initial parameters at every call."""
    torch.manual_seed(0)
    return GPT(size)


def make_data(num_samples: int, size: Size = SMALL) -> TensorDataset:
    """Random tokens [length + 1]: what they are does not change how long a step takes."""
    return TensorDataset(
        torch.randint(
            size.vocabulary, (num_samples, size.length + 1), generator=torch.Generator().manual_seed(1)
        )
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy over tokens."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW at its defaults."""
    return torch.optim.AdamW(named, lr=3e-4)


def make_fused_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW, all parameters of a group in one kernel. Such a kernel takes DTensors or plain tensors, so they
    are groups of their own."""
    groups = [
        [(name, each) for name, each in named if isinstance(each, DTensor) == divided]
        for divided in (False, True)
    ]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=3e-4, fused=True)

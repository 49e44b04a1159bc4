"""The benchmark GPT and its data: vocabulary 2000, width 384, 6 blocks, 6 heads, length 128, separate q, k, v, untied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, BLOCKS, HEADS, LENGTH = 2000, 384, 6, 6, 128


class Block(nn.Module):
    """[batch, length, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        # Heads are counted by their size, so that a peer that cuts q, k and v by hand finds its own number of them.
        q, k, v = (each(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> GPT:
    """The same initial parameters at every call."""
    torch.manual_seed(0)
    return GPT()


def make_data(num_samples: int) -> TensorDataset:
    """Random tokens [length + 1]: what they are does not change how long a step takes."""
    return TensorDataset(torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(1)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy over tokens."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW at its defaults."""
    return torch.optim.AdamW(named, lr=3e-4)


def make_fused_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW, all parameters of a group in one kernel. Such a kernel takes DTensors or plain tensors, so they are groups of their own."""
    groups = [[(name, each) for name, each in named if isinstance(each, DTensor) == divided] for divided in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=3e-4, fused=True)

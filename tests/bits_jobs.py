"""The jobs of `bits.py`, which two trees run: of the package they use what users do, and nothing else of the tests.

Together they have what training rounds, draws and keeps: an attention and its dropout, tied weights, batch norm, convolutions, momentum, Adam, clipping,
schedulers, an embedding, a short last batch, a layer without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

SAMPLES, STEPS = 44, 10  # of batches of 12: the fourth is short, and steps go through three epochs


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, 29]."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(29, width), nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 29, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up, self.down, self.dropout = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class CNN(nn.Module):
    """Images [batch, 3, 10, 10] -> logits [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, groups=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


class MLP(nn.Module):
    """[batch, 7] -> [batch, 5]; one layer is used twice, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.unused, self.head = (
            nn.Linear(7, 13),
            nn.Linear(13, 13),
            nn.Linear(13, 13),
            nn.Linear(13, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


def token_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Summed over the tokens that count, and how many those are."""
    (tokens,) = batch
    counts = tokens[:, 1:] != 0
    losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * counts.flatten()).sum(), counts.sum()


def class_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def tokens() -> TensorDataset:
    return TensorDataset(torch.randint(29, (SAMPLES, 12), generator=torch.Generator().manual_seed(1)))


def classes(*shape: int) -> Callable[[torch.dtype], TensorDataset]:
    def data(dtype: torch.dtype) -> TensorDataset:
        drawn = torch.Generator().manual_seed(2)
        x = torch.randn(SAMPLES, *shape, generator=drawn)
        return TensorDataset(x.to(dtype), torch.randint(5, (SAMPLES,), generator=drawn))

    return data


def adamw(named: Any) -> torch.optim.Optimizer:
    """Decay for matrices alone."""
    groups = [[each for _, each in named if (each.ndim > 1) == which] for which in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=3e-3
    )


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def warmup(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def _job(dtype: torch.dtype, model: Callable[[], nn.Module], **settings: Any) -> ml.Job:
    return ml.Job(
        model=lambda: model().to(dtype), batch_size=12, steps=STEPS, checkpoint_every=1, keep_checkpoints=STEPS, **settings
    )  # fmt: skip


def _gpt(dtype: torch.dtype) -> ml.Job:
    return _job(dtype, GPT, loss=token_loss, optimizer=adamw, data=tokens, scheduler=warmup)


def _cnn(dtype: torch.dtype) -> ml.Job:
    return _job(
        dtype,
        CNN,
        loss=class_loss,
        optimizer=sgd,
        data=lambda: classes(3, 10, 10)(dtype),
        clip_grad_norm=0.25,
    )


def _mlp(dtype: torch.dtype) -> ml.Job:
    return _job(
        dtype, MLP, loss=class_loss, optimizer=adamw, data=lambda: classes(7)(dtype), clip_grad_norm=0.5
    )


gpt_float32, gpt_float64 = _gpt(torch.float32), _gpt(torch.float64)
cnn_float32, cnn_float64 = _cnn(torch.float32), _cnn(torch.float64)
mlp_float32, mlp_float64 = _mlp(torch.float32), _mlp(torch.float64)

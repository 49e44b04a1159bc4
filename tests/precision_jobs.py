"""Jobs that are run in every precision: sizes are odd, widths that tp=2 divides are even, and nothing has one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.jobs import GPT, Samples, class_loss, images, texts, token_loss, vectors

MODELS = ["mlp", "cnn", "gpt", "lstm", "experts"]


def job_of(model: str, **overrides: Any) -> Job:
    """A job of three steps on batches of 12; `overrides` are fields of `Job`."""
    build, loss, data = _MODELS[model]
    settings: dict[str, Any] = {
        "model": build, "loss": loss, "data": data, "batch_size": 12, "steps": 3, "seed": 5, "clip_grad_norm": 1.0,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=2e-3),
    }  # fmt: skip
    return Job(**(settings | overrides))


class _MLP(nn.Module):
    """[batch, 7] -> [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 32), nn.Linear(32, 22), nn.Linear(22, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.norm(x + self.third(F.gelu(self.second(x)))))


class _CNN(nn.Module):
    """[batch, 1, 6, 6] -> [batch, 5]; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.hidden, self.head = nn.Linear(16 * 4, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(x)))
        x = F.silu(self.norm2(self.conv2(x)))
        return self.head(torch.tanh(self.hidden(F.avg_pool2d(x, 2).flatten(1))))


class _LSTM(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, 29]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(29, 16), nn.LSTM(16, 18, 2, batch_first=True)
        self.up, self.head = nn.Linear(18, 32), nn.Linear(32, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.lstm(self.embed(x))[0])))


class _Expert(nn.Module):
    """[batch, length, width] -> the same: every expert computes every token, two count."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).float().softmax(-1)
        best = weights.topk(2, -1)
        chosen = torch.zeros_like(weights).scatter(-1, best.indices, best.values)
        hidden = F.silu(torch.einsum("bld,edh->eblh", x, self.up))
        return torch.einsum("eblh,ehd,ble->bld", hidden, self.down, chosen.to(hidden.dtype))


class _Experts(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, 29]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.experts = nn.ModuleList(_Expert(16, 20, 4) for _ in range(2))
        self.head = nn.Linear(16, 29)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, experts in zip(self.norms, self.experts, strict=False):
            x = x + experts(norm(x))
        return self.head(self.norms[2](x))


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[], Samples]]] = {
    "mlp": (_MLP, class_loss, vectors),
    "cnn": (_CNN, class_loss, images),
    "gpt": (lambda: GPT(24), token_loss, texts),
    "lstm": (_LSTM, token_loss, texts),
    "experts": (_Experts, token_loss, texts),
}

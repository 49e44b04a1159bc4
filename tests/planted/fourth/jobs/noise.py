"""A denoiser: draws in the loss and in the metric, and a weight that depends on the step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Signals(torch.utils.data.Dataset):
    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 8, generator=generator).cumsum(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(9, 16)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(16, 8)

    def forward(self, x, time):
        x = self.drop(torch.tanh(self.enter(torch.cat([x, time[:, None]], 1))))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def denoised(model, x):
    time = torch.rand(len(x), dtype=x.dtype, device=x.device)
    noise = torch.randn_like(x)
    return F.mse_loss(model((1 - time[:, None]) * x + time[:, None] * noise, time), noise)


def loss(model, x):
    return denoised(model, x) * min(1.0, (1 + ml.step()) / 5)


def weighted(model, x):
    return denoised(model, x) * min(1.0, (1 + ml.step()) / 5)


job = ml.Job(
    model=Denoiser,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3),
    data=lambda: Signals(29, 1),
    batch_size=8,
    steps=40,
    clip_grad_norm=1.0,
    evaluate=ml.Evaluate(lambda: Signals(15, 2), {"denoised": denoised, "weighted": weighted}, every=5),
    checkpoint_every=5,
    keep_checkpoints=10,
)
plain = replace(
    job, loss=denoised, evaluate=ml.Evaluate(lambda: Signals(15, 2), {"denoised": denoised}, every=5)
)

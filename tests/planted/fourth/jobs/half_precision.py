"""Gradients that overflow float16 at first, and bfloat16."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 11, generator=generator)
        self.y = self.x[:, :3].sin() + 0.1 * torch.randn(num_samples, 3, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(11, 17)
        self.two = nn.Linear(17, 17)
        self.out = nn.Linear(17, 3)

    def forward(self, x):
        x = F.gelu(self.one(x))
        return self.out(x + F.gelu(self.two(x)))


def steep_loss(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1].float()) * 30


def plain(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1].float())


job = ml.Job(
    model=Net,
    loss=steep_loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.6**step),
    data=lambda: Rows(21, 3),
    batch_size=6,
    steps=40,
    evaluate=ml.Evaluate(lambda: Rows(13, 4), {"loss": plain}, every=4),
    checkpoint_every=4,
    keep_checkpoints=20,
)
average = replace(job, average=0.7, scheduler=None)
masters = replace(
    job,
    loss=plain,
    scheduler=None,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    clip_grad_norm=1.0,
)

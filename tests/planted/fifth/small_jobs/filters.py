"""Complex weights on Fourier coefficients; noise of a drawn strength is to be told from what it is added to."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    return TensorDataset(torch.randn(n, 12, generator=g).cumsum(1))


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, dtype=torch.complex64) * 0.5)

    def forward(self, h):
        return torch.fft.irfft(torch.fft.rfft(h) * self.w, n=12)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(13, 12)
        self.f1 = Filter()
        self.mid = nn.Linear(12, 12)
        self.f2 = Filter()
        self.out = nn.Linear(12, 12)

    def forward(self, x, t):
        h = torch.tanh(self.inp(torch.cat([x, t], 1)))
        h = torch.tanh(self.mid(self.f1(h)))
        return self.out(self.f2(h))


def loss(m, b):
    (x,) = b
    t = torch.rand(len(x), 1, dtype=x.dtype)
    e = torch.randn_like(x)
    return nn.functional.mse_loss(m((1 - t) * x + t * e, t), e)


def make(**kw):
    return ml.Job(
        **kw,
        model=Net,
        loss=loss,
        optimizer=lambda named: torch.optim.Adam([p for n, p in named], lr=1e-2),
        data=data,
        batch_size=8,
        steps=40,
        evaluate=ml.Evaluate(data=lambda: data(7, 1), metrics={"e": loss}, every=2),
    )


job = make()
clipped = make(clip_grad_norm=0.3)

"""Buffers that forwards move (a running power, the centre of a student's targets), and a denoiser of rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

# A running power, and a denoiser.


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_rows, 7, generator=generator) * 2 + 0.5
        self.y = torch.randn(num_rows, 3, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Running(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("power", torch.ones(width))

    def forward(self, x):
        y = torch.tanh(x * self.gain / self.power.sqrt())
        if self.training:
            with torch.no_grad():
                self.power.mul_(0.8).add_(0.2 * x.detach().square().mean(0))
        return y


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale1 = Running(7)
        self.mid = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.out = nn.Linear(11, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.mid(self.scale1(x)))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 12)
        self.inp = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 26)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(26, 12)
        self.out = nn.Linear(12, 7)

    def forward(self, x, time):
        hidden = self.inp(x) + self.time(time)
        hidden = hidden + self.down(self.drop(F.gelu(self.up(self.norm(hidden)))))
        return self.out(hidden)


def squared_error(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def noise_error(model, batch):
    x = batch["x"]
    time = torch.randint(0, 10, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    share = (time.float()[:, None] + 1) / 11
    return F.smooth_l1_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time), noise, beta=0.4)


def clean_error(model, batch):
    start = torch.zeros(len(batch["x"]), dtype=torch.long, device=batch["x"].device)
    return F.mse_loss(model(batch["x"], start), batch["x"])


def rows_job(model, loss, metric):
    return ml.Job(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=4e-3),
        data=lambda: Rows(21),
        batch_size=6,
        steps=40,
        evaluate=ml.Evaluate(data=lambda: Rows(10, 5), metrics={"error": metric}, every=10),
    )


power = rows_job(Scaled, squared_error, squared_error)
denoiser = rows_job(Denoiser, noise_error, clean_error)

# The centre of a student's targets (as DINO has).


class Views(torch.utils.data.Dataset):
    def __init__(self, num_views, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_views, 6, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {
            "one": self.x[index] + 0.1 * torch.randn(6),
            "two": self.x[index] + 0.1 * torch.randn(6),
        }


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        centred = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.6).add_(0.4 * x.detach().mean(0))
        return centred


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
        self.centre = Centre()

    def forward(self, batch):
        return self.trunk(batch["one"]), self.centre(self.trunk(batch["two"]))


def student_loss(model, batch):
    student, teacher = model(batch)
    target = torch.softmax(teacher.detach() / 0.2, 1)
    return -(target * torch.log_softmax(student, 1)).sum(1).mean()


student = ml.Job(
    model=Student,
    loss=student_loss,
    optimizer=lambda named: torch.optim.NAdam([p for _, p in named], lr=1e-2),
    data=lambda: Views(26, 1),
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(lambda: Views(9, 2), {"loss": student_loss}, every=5),
    checkpoint_every=5,
    keep_checkpoints=10,
)

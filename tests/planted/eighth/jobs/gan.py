"""A critic and a generator, in turn."""

import torch
from torch import nn

import meshloom as ml


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 21), nn.SiLU(), nn.Linear(21, 2))
        self.critic = nn.Sequential(nn.Linear(2, 19), nn.SiLU(), nn.Linear(19, 1))

    def fake(self, like):
        return self.generator(torch.randn(len(like), 3))


def data():
    g = torch.Generator().manual_seed(1)
    angle = 6.28 * torch.rand(48, generator=g)
    return torch.utils.data.TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))


def critic_loss(model, batch):
    fake = model.fake(batch[0]).detach()
    return (model.critic(fake) - model.critic(batch[0])).mean() + 0.1 * model.critic(batch[0]).square().mean()


def generator_loss(model, batch):
    return -model.critic(model.fake(batch[0])).mean()


def adam(named):
    return torch.optim.Adam([p for _, p in named], lr=5e-3, betas=(0.3, 0.9))


job = ml.Job(
    model=GAN,
    losses={
        "critic": ml.Objective(
            loss=critic_loss,
            optimizer=adam,
            parameters="critic",
            updates=2,
            clip_grad_norm=0.5,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
        ),
        "generator": ml.Objective(
            loss=generator_loss,
            optimizer=adam,
            parameters="generator",
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ),
    },
    data=data,
    batch_size=12,
    steps=6,
)

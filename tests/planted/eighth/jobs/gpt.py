"""A small GPT with a tied head, on numbers that follow each other."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

V, D, H, T = 23, 15, 3, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, H, D // H).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self, noise=0.0):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention()
        self.up, self.down = nn.Linear(D, 33), nn.Linear(33, D)
        self.drop = nn.Dropout(0.1)
        self.noise = noise

    def forward(self, x):
        x = x + self.drop(self.attn(self.n1(x)))
        h = F.gelu(self.up(self.n2(x)))
        if self.noise and self.training:
            h = self.drop(h)
            x = x + self.noise * torch.randn_like(x)
        return x + self.drop(self.down(h))


class GPT(nn.Module):
    def __init__(self, tied=True, noise=0.0):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(noise) for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def data(n=66, seed=3):
    g = torch.Generator().manual_seed(seed)
    first = torch.randint(0, V, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    x = (first + step * torch.arange(T + 1)) % V
    lengths = torch.randint(3, T + 1, (n,), generator=g)
    y = torch.where(torch.arange(T) < lengths[:, None], x[:, 1:], -100)
    return torch.utils.data.TensorDataset(x[:, :-1], y)


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def token_loss(model, batch):
    x, y = batch
    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    return total, (y != -100).sum()


def groups(named):
    decayed = [p for n, p in named if p.ndim > 1]
    others = [p for n, p in named if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=4e-3
    )


common = {"data": data, "batch_size": 12, "steps": 6, "seed": 5}
evaluation = ml.Evaluate(lambda: data(29, 9), {"nll": token_loss}, every=3)
job = ml.Job(
    model=GPT,
    loss=token_loss,
    optimizer=groups,
    scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    clip_grad_norm=1.0,
    evaluate=evaluation,
    **common,
)
gentle = ml.Job(model=GPT, loss=token_loss, optimizer=groups, clip_grad_norm=50.0, **common)
noisy = ml.Job(model=lambda: GPT(False, 0.3), loss=token_loss, optimizer=groups, **common)
untied = ml.Job(model=lambda: GPT(False), loss=token_loss, optimizer=groups, **common)
averaged = ml.Job(model=GPT, loss=mean_loss, optimizer=groups, average=0.9, evaluate=evaluation, **common)
plain = ml.Job(
    model=lambda: GPT(False),
    loss=mean_loss,  # of equal weight on all replicas, as local steps promise something for these alone
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.3),
    **common,
)

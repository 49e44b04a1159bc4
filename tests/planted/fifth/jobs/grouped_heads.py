"""A decoder on padded texts: tied table, grouped heads, dropout, class weights, groups of parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

V, D, H, K = 29, 24, 4, 2


class Attention(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.q, self.kv, self.out, self.rate = (
            nn.Linear(D, D),
            nn.Linear(D, 2 * K * (D // H)),
            nn.Linear(D, D),
            drop,
        )

    def forward(self, x, mask):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, H, D // H).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, K, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.rate if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.one, self.two, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), Attention(drop)
        self.up, self.down, self.drop = nn.Linear(D, 2 * 48), nn.Linear(48, D), nn.Dropout(drop)

    def forward(self, x, mask):
        x = x + self.drop(self.attention(self.one(x), mask))
        return x + self.drop(self.down(F.glu(self.up(self.two(x)), -1)))


class Text(nn.Module):
    def __init__(self, drop=0.1):
        super().__init__()
        self.embed, self.places = nn.Embedding(V, D, padding_idx=1), nn.Embedding(16, D)
        self.blocks, self.norm = nn.ModuleList(Block(drop) for _ in range(2)), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("importance", torch.linspace(0.5, 1.5, V))

    def forward(self, ids):
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).tril() & (ids != 1)[:, None, None, :] | torch.eye(
            t, dtype=torch.bool
        )
        x = self.embed(ids) + self.places(torch.arange(t))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Texts(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.texts = [
            torch.randint(2, V, (int(torch.randint(4, 10, (), generator=g)),), generator=g) for _ in range(n)
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i]


def collate(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=1)


def loss(model, ids):
    logits, target = model(ids[:, :-1]), ids[:, 1:]
    target = torch.where(target == 1, -100, target)
    total = F.cross_entropy(
        logits.transpose(1, 2), target, weight=model.importance, reduction="sum", label_smoothing=0.1
    )
    return total, (target != -100).sum()


def nll(model, ids):
    logits, target = model(ids[:, :-1]), ids[:, 1:]
    return F.nll_loss(
        logits.log_softmax(-1).flatten(0, 1), target.flatten(), ignore_index=1, reduction="sum"
    ), (target != 1).sum()


def optimizer(named):
    decay = [p for n, p in named if p.ndim > 1]
    rest = [p for n, p in named if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}], lr=5e-3
    )


job = ml.Job(
    model=Text,
    loss=loss,
    optimizer=optimizer,
    data=lambda: Texts(21, 0),
    batch_size=8,
    steps=40,
    collate=collate,
    scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
    clip_grad_norm=1.0,
    evaluate=ml.Evaluate(data=lambda: Texts(11, 1), metrics={"nll": nll}, every=5),
)

"""An embedding with sparse gradients, some of whose used rows have a gradient of exactly zero."""

import torch
from torch import nn

import meshloom as ml


class Words(torch.utils.data.Dataset):
    """Tokens [6]; what counts of each [6]: nothing of the word 4 in every other sample."""

    def __init__(self):
        g = torch.Generator().manual_seed(5)
        self.x = torch.randint(0, 5, (36, 6), generator=g)
        self.x[:, 0] = 4
        self.y = torch.randn(36, 6, generator=g)

    def __len__(self):
        return 36

    def __getitem__(self, i):
        counts = torch.where(self.x[i] == 4, float((i // 12) % 2), 1.0)
        return {"x": self.x[i], "y": self.y[i], "counts": counts}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3, sparse=True)
        self.hidden = nn.Linear(3, 9)
        self.out = nn.Linear(9, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.embed(x))))[..., 0]


def loss(model, batch):
    error = batch["counts"] * (model(batch["x"]) - batch["y"]) ** 2
    return error.sum(), batch["counts"].sum()


def optimizer(named):
    return [
        torch.optim.SparseAdam([p for n, p in named if n == "embed.weight"], lr=0.05),
        torch.optim.Adam([p for n, p in named if n != "embed.weight"], lr=0.02),
    ]


def words():
    return ml.Job(
        model=Tagger, loss=loss, optimizer=optimizer, data=Words, batch_size=12, steps=9, shuffle=False
    )

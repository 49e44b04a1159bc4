"""Two tasks, told by a long text in the batch; a norm that stays in evaluation mode."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

PROMPT = (
    "Given the following measurements of a specimen, taken by the same instrument in the same room over one afternoon, "
    * 2
)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.body = nn.Linear(8, 14), nn.BatchNorm1d(14), nn.Linear(14, 14)
        self.classes, self.values = nn.Linear(14, 5), nn.Linear(14, 1)
        self.norm.running_mean.uniform_(-0.3, 0.3)
        self.norm.eval()

    def forward(self, x):
        return F.relu(self.body(F.relu(self.norm(self.enter(x)))))


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 8, generator=g), torch.randint(0, 5, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def collate(samples):
    x, y = torch.utils.data.default_collate(samples)
    return {
        "x": x,
        "y": y,
        "task": PROMPT + ("name its class." if float(torch.rand(())) < 0.5 else "estimate its value."),
    }


def loss(model, batch):
    h = model(batch["x"])
    if batch["task"].endswith("class."):
        return F.cross_entropy(model.classes(h), batch["y"])
    return F.mse_loss(model.values(h)[:, 0], batch["y"].float()) + 0 * model.classes(h).sum()


def ce(model, batch):
    return F.cross_entropy(model.classes(model(batch["x"])), batch["y"])


job = ml.Job(
    model=Tasks,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.03, momentum=0.9),
    data=lambda: Rows(22, 0),
    batch_size=8,
    steps=40,
    collate=collate,
    shuffle=False,
    scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [5, 9], 0.5),
    evaluate=ml.Evaluate(data=lambda: Rows(9, 1), metrics={"ce": ce}, every=5),
)

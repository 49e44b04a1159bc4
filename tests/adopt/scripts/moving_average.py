"""A network with an exponential moving average of its parameters, and batches asked for one by one for ever."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


def cycle(loader):
    while True:
        yield from loader


def run(steps=60, batch_size=16, lr=3e-3, warmup=10):
    torch.manual_seed(11)
    x, y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))
    ema = EMA(model, 0.99)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(s + 1, warmup) / warmup)
    batches = cycle(loader)
    for step in range(steps):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        opt.step()
        sched.step()
        ema.update(model)
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    run()

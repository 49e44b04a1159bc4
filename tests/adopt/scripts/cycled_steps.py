"""itertools.cycle and a fixed number of steps, a printed gradient norm, a written EMA."""

from itertools import cycle, islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1234)
MAX_STEPS = 60
LOG_EVERY = 10


class Spirals(Dataset):
    def __init__(self, n=300):
        g = torch.Generator().manual_seed(0)
        t = torch.rand(n, generator=g) * 3
        self.y = torch.arange(n) % 2
        angle = 2 * torch.pi * t / 2 + torch.pi * self.y
        self.x = torch.stack([t * angle.cos(), t * angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


loader = DataLoader(Spirals(), batch_size=25, shuffle=True, drop_last=True)
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=MAX_STEPS)

for step, (x, y) in enumerate(islice(cycle(loader), MAX_STEPS)):
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    sched.step()
    if step % LOG_EVERY == 0:
        print(f"{step:4d} loss {loss.item():.3f} |g| {norm:.2f}")

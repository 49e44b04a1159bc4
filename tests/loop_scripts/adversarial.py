"""Two models that train against each other; initial values drawn when they are parallel already; noise for the whole batch."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml

torch.manual_seed(999)
nz = 5


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)
        nn.init.zeros_(m.bias)


dataloader = ml.loader(DataLoader(TensorDataset(torch.randn(60, 8)), batch_size=14, shuffle=True))
net_g = ml.parallel(nn.Sequential(nn.Linear(nz, 16), nn.ReLU(), nn.Linear(16, 8)))
net_g.apply(weights_init)
net_d = ml.parallel(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()))
net_d.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz)
optimizer_d, optimizer_g = optim.Adam(net_d.parameters(), lr=2e-3), optim.Adam(net_g.parameters(), lr=2e-3)
for (data,) in dataloader:
    net_d.zero_grad()
    label = torch.full((data.size(0),), 1.0)
    error_real = criterion(net_d(data).view(-1), label)
    error_real.backward()
    fake = net_g(ml.share(torch.randn(int(ml.sum(data.size(0))), nz)))
    label.fill_(0.0)
    error_fake = criterion(net_d(fake.detach()).view(-1), label)
    error_fake.backward()
    optimizer_d.step()
    net_g.zero_grad()
    label.fill_(1.0)
    error_g = criterion(net_d(fake).view(-1), label)
    error_g.backward()
    optimizer_g.step()
    net_g(fixed_noise)
if ml.main:
    print("done")

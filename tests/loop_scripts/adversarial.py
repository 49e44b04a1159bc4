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
netG = ml.parallel(nn.Sequential(nn.Linear(nz, 16), nn.ReLU(), nn.Linear(16, 8)))
netG.apply(weights_init)
netD = ml.parallel(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()))
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz)
optimizerD, optimizerG = optim.Adam(netD.parameters(), lr=2e-3), optim.Adam(netG.parameters(), lr=2e-3)
for (data,) in dataloader:
    netD.zero_grad()
    label = torch.full((data.size(0),), 1.0)
    errD_real = criterion(netD(data).view(-1), label)
    errD_real.backward()
    fake = netG(ml.share(torch.randn(int(ml.sum(data.size(0))), nz)))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    netG(fixed_noise)
if ml.main:
    print("done")

"""A generator and a discriminator with an optimizer each."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataloader = DataLoader(
    TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 16), batch_size=16, shuffle=True
)
netG = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
netD = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4)
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4)

for epoch in range(2):
    for i, (real,) in enumerate(dataloader):
        netD.zero_grad()
        output = netD(real)
        errD_real = criterion(output, torch.ones_like(output))
        errD_real.backward()
        fake = netG(torch.randn(len(real), 8))
        output = netD(fake.detach())
        errD_fake = criterion(output, torch.zeros_like(output))
        errD_fake.backward()
        optimizerD.step()

        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
    print(epoch, i, errG.item())

"""A loss that is a sum over samples, and an average of it over the data."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 20)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, eps):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        return self.decode(mu + eps * torch.exp(0.5 * logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
train_loader = ml.loader(DataLoader(TensorDataset(torch.rand(50, 20)), batch_size=12, shuffle=True))
model = ml.parallel(VAE())
optimizer = optim.Adam(model.parameters(), lr=1e-2)
for _ in range(2):
    train_loss = 0
    for (data,) in train_loader:
        optimizer.zero_grad()
        rows = int(ml.sum(len(data)))
        recon, mu, logvar = model(data, ml.share(torch.randn(rows, 4)))
        loss = ml.sum(loss_function(recon, data, mu, logvar))
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    if ml.main:
        print(f"average {train_loss / 50:.4f}")
with torch.no_grad():
    sample = model.decode(torch.randn(3, 4))

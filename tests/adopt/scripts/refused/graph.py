"""A graph network, trained on the whole graph in each step."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
features = torch.tensor(load_digits().data[:64], dtype=torch.float32) / 16
labels = torch.tensor(load_digits().target[:64])
adjacency = torch.softmax(features @ features.T, dim=1)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x, adjacency):
        return self.second(adjacency @ F.relu(self.first(adjacency @ x)))


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(10):
    optimizer.zero_grad()
    output = model(features, adjacency)
    loss = F.cross_entropy(output[:48], labels[:48])
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())

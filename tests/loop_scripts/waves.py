"""An optimizer that decides by what its closure returns, on tensors that are the same in every step."""

import torch
from torch import nn, optim

import meshloom as ml

torch.manual_seed(0)
time = torch.arange(12.0)
waves = torch.sin((time + torch.randn(9, 1) * 4) / 3)
inputs, target = ml.share((waves[:, :-1], waves[:, 1:]))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.linear = nn.LSTMCell(1, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = c = x.new_zeros(x.size(0), 8)
        outputs = []
        for step in x.split(1, dim=1):
            h, c = self.lstm1(step, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, dim=1)


seq = ml.parallel(Sequence())
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=6)
for _ in range(3):

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(inputs), target)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
print(f"{float(loss):.5f}")

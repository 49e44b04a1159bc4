"""Two heads, of which the second one's weight in the loss goes up with the steps."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.digit = nn.Linear(32, 10)
        self.image = nn.Linear(32, 64)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.digit(hidden), self.image(hidden)


def main():
    epochs, warmup_steps = 3, 50
    torch.manual_seed(9)
    x, y = load_digits(return_X_y=True)
    train_set = TensorDataset(torch.tensor(x[:1280], dtype=torch.float32) / 16, torch.tensor(y[:1280]))
    model = TwoHeads()
    optimizer = optim.Adam(
        [
            {"params": model.trunk.parameters(), "lr": 1e-3},
            {"params": [*model.digit.parameters(), *model.image.parameters()]},
        ],
        lr=1e-2,
    )
    global_step = 0
    for epoch in range(epochs):
        for x, y in DataLoader(train_set, batch_size=32, shuffle=True):
            digit, image = model(x)
            weight = min(1.0, global_step / warmup_steps)
            loss = F.cross_entropy(digit, y) + weight * F.mse_loss(image, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

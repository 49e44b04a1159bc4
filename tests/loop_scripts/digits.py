"""Handwritten digits: a shuffled loader with augmentation, a test loader that is left alone, a schedule of rates, a file at the end."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import meshloom as ml


class Digits(Dataset):
    def __init__(self, train):
        found = load_digits()
        part = slice(0, 300) if train else slice(300, 400)
        self.x, self.y = torch.tensor(found.images[part]).float() / 16, torch.tensor(found.target[part])
        self.train = train

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = 0.05 * torch.randn(1, 8, 8) if self.train else 0.0
        return self.x[i].unsqueeze(0) + noise, self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.fc1, self.fc2 = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (
                output.argmax(dim=1, keepdim=True)
                .eq(target.view_as(output.argmax(dim=1, keepdim=True)))
                .sum()
                .item()
            )
    if ml.main:
        print(f"test: {test_loss / len(loader.dataset):.4f}, {correct}/{len(loader.dataset)}")


def main():
    torch.manual_seed(1)
    train_loader = ml.loader(DataLoader(Digits(True), batch_size=37, shuffle=True))
    test_loader = DataLoader(Digits(False), batch_size=50)
    model = ml.parallel(Net())
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    if len(sys.argv) > 1:
        ml.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()

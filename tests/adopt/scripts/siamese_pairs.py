"""Two images, one network twice: are they the same digit? The dataset draws its pairs."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.fc = nn.Sequential(nn.Linear(256, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
        self.sigmoid = nn.Sigmoid()
        self.features.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.features(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))


class AppMatcher(Dataset):
    def __init__(self, train):
        images, targets = load_digits(return_X_y=True)
        keep = slice(0, 1200) if train else slice(1200, 1600)
        self.data = torch.tensor(images[keep], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.targets = targets[keep]
        self.group_examples()

    def group_examples(self):
        self.grouped = {i: np.where(self.targets == i)[0] for i in range(10)}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        selected_class = random.randint(0, 9)
        first = random.choice(self.grouped[selected_class])
        if index % 2 == 0:
            second = random.choice(self.grouped[selected_class])
            target = torch.tensor(1, dtype=torch.float)
        else:
            other = random.choice([i for i in range(10) if i != selected_class])
            second = random.choice(self.grouped[other])
            target = torch.tensor(0, dtype=torch.float)
        return self.data[first], self.data[second], target


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):
        images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(images_1)}] Loss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    criterion = nn.BCELoss()
    with torch.no_grad():
        for images_1, images_2, targets in test_loader:
            images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
            outputs = model(images_1, images_2).squeeze()
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(test_loader.dataset)}\n")


def main():
    torch.manual_seed(1)
    random.seed(1)
    device = torch.device("cpu")
    train_loader = DataLoader(AppMatcher(True), batch_size=64, shuffle=True)
    test_loader = DataLoader(AppMatcher(False), batch_size=50)
    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()

"""A siamese network that tells whether two digits are the same."""

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16))
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, input1, input2):
        output = torch.cat((self.trunk(input1), self.trunk(input2)), 1)
        return self.sigmoid(self.fc(output))


class Matcher(Dataset):
    def __init__(self, first, last):
        digits = load_digits()
        self.data = torch.tensor(digits.images[first:last], dtype=torch.float32).unsqueeze(1) / 16
        self.targets = digits.target[first:last]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        other = (7 * index + 3) % len(self.data)
        same = float(self.targets[index] == self.targets[other])
        return self.data[index], self.data[other], torch.tensor(same)


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
            print(
                f"Train Epoch: {epoch} [{batch_idx * len(images_1)}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}"
            )


def main():
    torch.manual_seed(1)
    device = torch.device("cpu")
    train_loader = DataLoader(Matcher(0, 1024), shuffle=True, batch_size=16)
    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 4):
        train(model, device, train_loader, optimizer, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()

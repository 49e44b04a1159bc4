"""Images from smaller ones, by sub-pixel convolution; the data is a class of its own."""

import argparse
from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, images, upscale_factor):
        self.images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16
        self.pool = nn.AvgPool2d(upscale_factor)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        target = self.images[index]
        return self.pool(target), target


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, (3, 3), (1, 1), (1, 1))
        self.conv2 = nn.Conv2d(16, 8, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))

    def _initialize_weights(self):
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight)


parser = argparse.ArgumentParser(description="Super resolution")
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nEpochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--seed", type=int, default=123)
opt = parser.parse_args()
print(opt)

torch.manual_seed(opt.seed)
device = torch.device("cpu")

print("===> Loading datasets")
train_set = Pairs(load_digits().images[:1024], opt.upscale_factor)
test_set = Pairs(load_digits().images[1024:], opt.upscale_factor)
training_data_loader = DataLoader(
    dataset=train_set, num_workers=opt.threads, batch_size=opt.batchSize, shuffle=True
)
testing_data_loader = DataLoader(
    dataset=test_set, num_workers=opt.threads, batch_size=opt.batchSize, shuffle=False
)

print("===> Building model")
model = Net(upscale_factor=opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): Loss: {loss.item():.4f}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            mse = criterion(model(batch[0].to(device)), batch[1].to(device))
            avg_psnr += 10 * log10(1 / mse.item())
    print(f"===> Avg. PSNR: {avg_psnr / len(testing_data_loader):.4f} dB")


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()

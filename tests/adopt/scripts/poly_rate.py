"""Segmentation of digits by a small U-Net, whose rate goes down by a polynomial that is computed in the loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.head = nn.Conv2d(2 * width, 2, 1)

    def forward(self, x):
        down = torch.relu(self.down(x))
        up = torch.relu(self.up(torch.relu(self.middle(down))))
        return self.head(torch.cat([down, up], 1))


def train(num_epochs, batch_size, base_lr, power):
    torch.manual_seed(31)
    images = torch.tensor(load_digits().images[:512], dtype=torch.float32).unsqueeze(1) / 16
    masks = (images[:, 0] > 0.5).long()
    loader = DataLoader(TensorDataset(images, masks), batch_size=batch_size, shuffle=True)
    net = UNet()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0]))
    optimizer = torch.optim.Adam(net.parameters(), lr=base_lr)
    max_iterations = num_epochs * len(loader)
    iter_num = 0
    for epoch_num in range(num_epochs):
        for image_batch, label_batch in loader:
            lr_ = base_lr * (1.0 - iter_num / max_iterations) ** power
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr_
            outputs = net(image_batch)
            loss = criterion(outputs, label_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            iter_num = iter_num + 1
        print(f"epoch {epoch_num} iteration {iter_num} loss {loss.item():.4f}")


if __name__ == "__main__":
    train(num_epochs=2, batch_size=16, base_lr=0.01, power=0.9)

"""A trainer whose base class, with the loop, is in a file of its own."""

import torch
from digits_trainer import DigitsTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(11)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train, valid = torch.utils.data.random_split(data, [960, 837], generator=torch.Generator().manual_seed(5))
    net = nn.Sequential(nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 10))
    trainer = DigitsTrainer(
        net,
        DataLoader(train, batch_size=48, shuffle=True),
        DataLoader(valid, batch_size=90),
        lr=2e-3,
        max_norm=1.0,
    )
    trainer.fit(3)


if __name__ == "__main__":
    main()

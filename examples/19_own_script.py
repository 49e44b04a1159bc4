"""A script with a loop of its own, which runs under a plan as it stands (docs/loops.md).

    python examples/19_own_script.py                                 # one process
    meshloom run    examples/19_own_script.py --plan dp=2            # two replicas, half of each batch on each
    meshloom run    examples/19_own_script.py --plan tp=2            # matrices on two ranks
    meshloom verify examples/19_own_script.py --plan dp=2,tp=2       # its first steps: those of one process?

Words of its own stand behind --: `-- --epochs 5 --out digits.pt`.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml


def digits(train: bool) -> TensorDataset:
    """1797 digits of 64 pixels, of which every fifth is held out."""
    found = load_digits()
    chosen = (torch.arange(len(found.target)) % 5 != 0) == train
    return TensorDataset(
        torch.tensor(found.data, dtype=torch.float32)[chosen] / 16, torch.tensor(found.target)[chosen]
    )


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Share of digits read correctly. Each replica reads its share of them."""
    model.eval()
    correct = torch.tensor(0.0)
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum()
    model.train()
    return float(ml.sum(correct)) / len(loader.dataset)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--epochs", type=int, default=3)
    words.add_argument("--out")
    given = words.parse_args()

    torch.manual_seed(0)
    train = ml.loader(DataLoader(digits(train=True), batch_size=64, shuffle=True))
    held_out = ml.loader(DataLoader(digits(train=False), batch_size=120))
    model = ml.parallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(given.epochs):
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        last, read = float(ml.mean(loss.detach())), accuracy(model, held_out)
        if ml.main:
            print(f"epoch {epoch + 1}  loss of the last batch {last:.4f}  accuracy {read:.4f}")
    if given.out:
        ml.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, given.out)


if __name__ == "__main__":
    main()

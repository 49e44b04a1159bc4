"""A loop that saves its place in the middle of an epoch and goes on from there: resumed_loop.py STEPS OUT [FROM]."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import meshloom as ml


class Noisy(Dataset):
    def __len__(self):
        return 43

    def __getitem__(self, index):
        x = torch.sin(torch.arange(6.0) * (index + 1)) + 0.1 * torch.randn(6)
        return x.double(), index % 3


def main():
    steps, out, *earlier = sys.argv[1:]
    torch.manual_seed(7)
    loader = ml.loader(DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=2))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = ml.parallel(model)
    done = 0
    if earlier:
        state = torch.load(earlier[0], weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        done = state["done"]
    while done < int(steps):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            done += 1
            if done == int(steps):
                break
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "done": done,
    }
    ml.save(state, out)


if __name__ == "__main__":
    main()

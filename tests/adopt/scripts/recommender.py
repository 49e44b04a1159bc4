"""Factors of users and items that predict ratings, trained in whole epochs by functions that are given what they need."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Ratings(Dataset):
    def __init__(self, users, items, count, seed=0):
        rng = np.random.default_rng(seed)
        self.users = rng.integers(0, users, count)
        self.items = rng.integers(0, items, count)
        self.ratings = (1 + (self.users * 7 + self.items * 3) % 5).astype(np.float32)

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, i):
        return self.users[i], self.items[i], self.ratings[i]


class MatrixFactorization(nn.Module):
    def __init__(self, users, items, factors):
        super().__init__()
        self.user_factors = nn.Embedding(users, factors)
        self.item_factors = nn.Embedding(items, factors)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        nn.init.normal_(self.user_factors.weight, std=0.1)
        nn.init.normal_(self.item_factors.weight, std=0.1)

    def forward(self, user, item):
        dot = (self.user_factors(user) * self.item_factors(item)).sum(1)
        return dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


def fit_epoch(net, batches, opt):
    net.train()
    for users, items, ratings in batches:
        opt.zero_grad()
        error = nn.functional.mse_loss(net(users, items), ratings)
        error.backward()
        opt.step()
    return error.item()


def main(num_users=40, num_items=30, factors=8, epochs=3, lr=0.05):
    torch.manual_seed(21)
    everything = Ratings(num_users, num_items, 1000)
    train, held_out = random_split(everything, [800, 200], generator=torch.Generator().manual_seed(0))
    train_batches = DataLoader(train, batch_size=50, shuffle=True)
    net = MatrixFactorization(num_users, num_items, factors)
    opt = torch.optim.Adagrad(net.parameters(), lr=lr)
    for epoch in range(epochs):
        print(epoch, fit_epoch(net, train_batches, opt))
    with torch.no_grad():
        errors = [(net(u, i) - r).square().mean() for u, i, r in DataLoader(held_out, batch_size=50)]
    print("held out:", torch.stack(errors).mean().item())


if __name__ == "__main__":
    main()

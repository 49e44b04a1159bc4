"""The data."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def get_loaders(batch_size):
    images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    labels = torch.tensor(load_digits().target)
    train = DataLoader(TensorDataset(images[:1024], labels[:1024]), batch_size=batch_size, shuffle=True)
    return train, DataLoader(TensorDataset(images[1024:], labels[1024:]), batch_size=batch_size)

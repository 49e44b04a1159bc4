import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset


def build_loaders(cfg, seed):
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    n_val = int(cfg["val_fraction"] * len(dataset))
    train, val = Subset(dataset, order[n_val:]), Subset(dataset, order[:n_val])
    return {
        "train": DataLoader(train, batch_size=cfg["batch_size"], shuffle=True),
        "val": DataLoader(val, batch_size=cfg["batch_size"]),
    }

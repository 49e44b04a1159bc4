"""One function builds the model, the optimizer and the schedule; another the loaders; a global config dict."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CFG = {"lr": 1e-2, "batch": 16, "epochs": 3, "hidden": 20, "seed": 5}


def make_loaders(cfg):
    g = torch.Generator().manual_seed(cfg["seed"])
    x = torch.randn(240, 6, generator=g)
    y = x.pow(2).sum(1, keepdim=True).sqrt()
    train, val = TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])
    return DataLoader(train, batch_size=cfg["batch"], shuffle=True), DataLoader(val, batch_size=48)


def build(cfg, device):
    model = nn.Sequential(nn.Linear(6, cfg["hidden"]), nn.ReLU(), nn.Linear(cfg["hidden"], 1))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return model, optimizer, scheduler


def run():
    torch.manual_seed(CFG["seed"])
    device = torch.device("cpu")
    train_loader, val_loader = make_loaders(CFG)
    net, opt, sched = build(CFG, device)
    loss_fn = nn.SmoothL1Loss()
    for ep in range(CFG["epochs"]):
        net.train()
        for xb, yb in train_loader:
            xb, yb = xb.to(device), yb.to(device)
            opt.zero_grad()
            loss_fn(net(xb), yb).backward()
            opt.step()
        sched.step()
        net.eval()
        with torch.no_grad():
            val = sum(loss_fn(net(xb), yb).item() * len(xb) for xb, yb in val_loader) / len(
                val_loader.dataset
            )
        print(ep, val)


if __name__ == "__main__":
    run()

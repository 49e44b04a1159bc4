"""Steps with torch's own moving average of the weights, which is evaluated every so many of them."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ema_decay", type=float, default=0.98)
    parser.add_argument("--eval_every", type=int, default=10)
    return parser.parse_args()


def evaluate(net, loader, device):
    net.eval()
    total, correct, loss_sum = 0, 0, 0.0
    with torch.inference_mode():
        for batch in loader:
            x, y = (t.to(device) for t in batch)
            logits = net(x)
            loss_sum += F.cross_entropy(logits, y, reduction="sum").item()
            correct += (logits.argmax(-1) == y).sum().item()
            total += y.numel()
    return {"loss": loss_sum / total, "acc": correct / total}


def main():
    args = get_args()
    torch.manual_seed(0)
    device = torch.device("cpu")
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    train_loader = DataLoader(
        TensorDataset(x[:1280], y[:1280]), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    valid_loader = DataLoader(TensorDataset(x[1280:], y[1280:]), batch_size=128)
    net = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.LayerNorm(48), nn.Linear(48, 10)).to(device)
    ema_net = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay))
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)

    global_step, best_acc = 0, 0.0
    for epoch in range(args.epochs):
        for x, y in train_loader:
            net.train()
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema_net.update_parameters(net)
            global_step += 1
            if global_step % args.eval_every == 0:
                metrics = evaluate(ema_net, valid_loader, device)
                print(epoch, global_step, metrics)
                if metrics["acc"] > best_acc:
                    best_acc = metrics["acc"]
                    torch.save(ema_net.module.state_dict(), "best.pt")


if __name__ == "__main__":
    main()

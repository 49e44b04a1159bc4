"""The script: the networks, the data and the loop are in files of their own."""

import argparse

import torch
from digits_data import get_loaders
from engine import evaluate, train_one_epoch
from networks import build

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--smoothing", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cpu")
    train_loader, test_loader = get_loaders(args.batch_size)
    model = build("mlp", args.width).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, optimizer, device, smoothing=args.smoothing)
        print(epoch, loss, evaluate(model, test_loader, device))
        scheduler.step()

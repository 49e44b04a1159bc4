"""argparse, logging and tqdm; tensorboard; a resumable checkpoint; autocast with a GradScaler; accumulation with a remainder."""

import argparse
import logging
import os
import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_wine
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

logger = logging.getLogger(__name__)


class WineDataset(Dataset):
    def __init__(self, split="train"):
        data = load_wine()
        features = torch.as_tensor(data.data, dtype=torch.float32)
        self.features = (features - features.mean(0)) / features.std(0)
        self.labels = torch.as_tensor(data.target)
        index = [i for i in range(len(self.labels)) if (i % 5 == 0) == (split == "val")]
        self.features, self.labels = self.features[index], self.labels[index]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"features": self.features[index], "label": self.labels[index]}


def parse_args():
    parser = argparse.ArgumentParser(description="train")
    parser.add_argument("--output-dir", type=str, default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--accum", type=int, default=2, help="gradient accumulation steps")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--resume", type=str, default=None)
    parser.add_argument("--amp", action="store_true")
    return parser.parse_args()


def save_checkpoint(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)


def train_one_epoch(model, loader, optimizer, scaler, criterion, device, args, epoch):
    model.train()
    total_loss = 0.0
    optimizer.zero_grad()
    progress = tqdm(loader, desc=f"Epoch {epoch}", leave=False)
    for step, batch in enumerate(progress):
        features, labels = batch["features"].to(device), batch["label"].to(device)
        with torch.amp.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            logits = model(features)
            loss = criterion(logits, labels)
        scaler.scale(loss / args.accum).backward()
        if (step + 1) % args.accum == 0 or (step + 1) == len(loader):
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            logger.debug("grad norm %.3f", grad_norm)
        total_loss += loss.item()
        progress.set_postfix(loss=f"{loss.item():.4f}")
    return total_loss / len(loader)


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    model.eval()
    total_loss, correct = 0.0, 0
    for batch in tqdm(loader, desc="eval", leave=False):
        features, labels = batch["features"].to(device), batch["label"].to(device)
        logits = model(features)
        total_loss += criterion(logits, labels).item() * labels.size(0)
        correct += (logits.argmax(dim=1) == labels).sum().item()
    n = len(loader.dataset)
    return total_loss / n, correct / n


def main():
    args = parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", handlers=[logging.StreamHandler(sys.stdout)]
    )
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logger.info("device: %s", device)
    train_loader = DataLoader(WineDataset("train"), batch_size=args.batch_size, shuffle=True, num_workers=0)
    val_loader = DataLoader(WineDataset("val"), batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(13, 32), nn.SiLU(), nn.Linear(32, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and device.type == "cuda")
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        train_loss = train_one_epoch(model, train_loader, optimizer, scaler, criterion, device, args, epoch)
        val_loss, val_acc = evaluate(model, val_loader, criterion, device)
        logger.info("epoch %d train %.4f val %.4f acc %.3f", epoch, train_loss, val_loss, val_acc)
        save_checkpoint(os.path.join(args.output_dir, f"checkpoint_{epoch}.pt"), model, optimizer, epoch)


if __name__ == "__main__":
    main()

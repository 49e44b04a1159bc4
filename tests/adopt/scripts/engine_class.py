"""A segmentation with dice loss, per-class IoU, gradient accumulation in an Engine-like class with a static config and a property."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, n, train=True):
        self.n, self.train = n, train

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i + (0 if self.train else 10_000))
        mask = (torch.randn(1, 4, 4, generator=g) > 0.5).float()
        mask = F.interpolate(mask[None], scale_factor=4)[0]
        return {"image": mask + 0.5 * torch.randn(1, 16, 16, generator=g), "mask": mask}


def dice_loss(logits, mask, eps=1.0):
    p = torch.sigmoid(logits)
    inter = (p * mask).sum((1, 2, 3))
    return (1 - (2 * inter + eps) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + eps)).mean()


class Engine:
    def __init__(self, net, train_loader, valid_loader, **options):
        self.net = net
        self.train_loader, self.valid_loader = train_loader, valid_loader
        self.options = options
        self.optim = torch.optim.SGD(net.parameters(), lr=options["lr"], momentum=0.9)
        self.bce = nn.BCEWithLogitsLoss()
        self.epoch = 0
        self.accumulate = options.get("accumulate", 1)

    @property
    def lr(self):
        return self.optim.param_groups[0]["lr"]

    def criterion(self, out, mask):
        return self.bce(out, mask) + dice_loss(out, mask)

    def one_epoch(self):
        self.net.train()
        self.optim.zero_grad()
        for i, batch in enumerate(self.train_loader):
            out = self.net(batch["image"])
            loss = self.criterion(out, batch["mask"]) / self.accumulate
            loss.backward()
            if (i + 1) % self.accumulate == 0:
                self.optim.step()
                self.optim.zero_grad()
            if i % 10 == 0:
                print(f"epoch {self.epoch} it {i} lr {self.lr:.4f} loss {loss.item():.4f}")

    def evaluate(self):
        self.net.eval()
        iou, n = 0.0, 0
        with torch.no_grad():
            for batch in self.valid_loader:
                pred = self.net(batch["image"]) > 0
                mask = batch["mask"] > 0
                inter = (pred & mask).sum((1, 2, 3)).float()
                union = (pred | mask).sum((1, 2, 3)).float()
                iou += (inter / union.clamp(min=1)).sum().item()
                n += len(mask)
        return iou / n

    def run(self, n_epochs):
        best = 0
        for self.epoch in range(n_epochs):
            self.one_epoch()
            score = self.evaluate()
            best = max(best, score)
            print("iou", score, best)


if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
    )
    engine = Engine(
        net,
        DataLoader(Blobs(96), batch_size=8, shuffle=True),
        DataLoader(Blobs(32, train=False), batch_size=16),
        lr=0.05,
        accumulate=2,
    )
    engine.run(2)

"""A loop of one's own with what vision training has: augmentation, mixup, a moving average of the parameters.

    python examples/15_resnet.py                         # one process
    meshloom run    examples/15_resnet.py --plan dp=2
    meshloom verify examples/15_resnet.py --plan dp=2

Words of its own stand behind --: `-- --epochs 2 --out resnet.pt`.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, default_collate

import meshloom as ml

BATCH = 32


class Block(nn.Module):
    """Two convolutions beside a shortcut, [batch, inputs, height, width] -> [batch, outputs, height / stride, width / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(
            4, outputs
        )  # samples do not interact, and averages need no statistics of their own
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + inside)


def resnet() -> nn.Module:
    """[batch, 1, 8, 8] -> [batch, 10], 0.15 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), Block(32, 32), Block(32, 64, stride=2), Block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Scanned digits: [1, 8, 8] between 0 and 1, and a class. For training they are turned, moved and resized a little, other each time."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        here = slice(0, 1400) if train else slice(1400, None)
        self.x = torch.tensor(digits.images[here] / 16, dtype=torch.float32).unsqueeze(1)
        self.y = torch.tensor(digits.target[here])
        self.train = train

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.train:
            angle, size = 0.15 * torch.randn(()), 1 + 0.1 * torch.randn(())
            turn = size * torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            where = torch.cat([turn, 0.1 * torch.randn(2, 1)], dim=1)
            x = F.grid_sample(x[None], F.affine_grid(where[None], [1, 1, 8, 8], align_corners=False), align_corners=False)[0]  # fmt: skip
        return x, self.y[index]


def mixup(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Each image of the batch with some of another one (Zhang et al., 2018)."""
    x, y = default_collate(samples)
    others = torch.randperm(len(x))
    share = torch.distributions.Beta(0.2, 0.2).sample()
    return {
        "x": share * x + (1 - share) * x[others],
        "y": y,
        "other": y[others],
        "share": share.expand(len(x)),
    }


def mixed_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    own, other = (F.cross_entropy(logits, batch[name], reduction="none") for name in ("y", "other"))
    return (batch["share"] * own + (1 - batch["share"]) * other).mean()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = sum(((model(x).argmax(1) == y).sum() for x, y in loader), torch.tensor(0))
    return float(ml.sum(correct)) / len(loader.dataset)


def rate(step: int, steps: int) -> float:
    """A warm-up and a cosine."""
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--epochs", type=int, default=11)
    words.add_argument("--out")
    given = words.parse_args()

    torch.manual_seed(0)
    # Partners are of the whole batch, so every replica reads and collates all of it, and keeps its rows: dp times the reading.
    train = DataLoader(Digits(train=True), BATCH, shuffle=True, drop_last=True, collate_fn=mixup)
    train = ml.loader(train, collate="whole")
    held_out = ml.loader(DataLoader(Digits(train=False), 100))
    model = ml.parallel(resnet())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = given.epochs * len(train)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    for epoch in range(given.epochs):
        for batch in train:
            loss = mixed_loss(model(batch["x"]), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
        last, right = float(ml.mean(loss.detach())), accuracy(average, held_out)
        if ml.main:
            print(
                f"epoch {epoch + 1}  loss of the last batch {last:.4f}  accuracy of the average {right:.3f}"
            )
    if given.out:
        ml.save(average.module.state_dict(), given.out)


if __name__ == "__main__":
    main()

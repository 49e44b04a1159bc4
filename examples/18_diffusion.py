"""A U-Net learns to take noise away from handwritten digits (DDPM; Ho et al., 2020), and then draws digits that nobody has written.

python examples/18_diffusion.py                                          # trains, then draws runs/diffusion.png
meshloom train  examples/18_diffusion.py --plan dp=2 --out runs/diffusion
meshloom verify examples/18_diffusion.py --plan pp=2,microbatches=2
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml
from meshloom.checkpoint.checkpoint import find
from meshloom.cli.main import main as meshloom

LEVELS, WIDTH = 100, 32  # of noise; channels
RUN, PICTURE = Path("runs/diffusion"), Path("runs/diffusion.png")


def kept(levels: Tensor) -> Tensor:
    """How much of an image's variance is left at each level, a cosine from 1 to 0 (Nichol & Dhariwal, 2021)."""
    return torch.cos((levels + 1) / (LEVELS + 1) * math.pi / 2).square()


class Block(nn.Module):
    """Two convolutions that know level and class, [batch, inputs, h, w] -> [batch, outputs, h, w]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.known = nn.Linear(4 * WIDTH, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        inside = F.silu(self.norm1(self.conv1(x))) + self.known(known)[:, :, None, None]
        return self.shortcut(x) + F.silu(self.norm2(self.conv2(inside)))


class UNet(nn.Module):
    """The noise in noisy digits: x [batch, 1, 8, 8], level and digit [batch] -> [batch, 1, 8, 8]; 0.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 4 * WIDTH)
        self.digit = nn.Embedding(10, 4 * WIDTH)
        self.begin = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.down1, self.down2 = Block(WIDTH, WIDTH), Block(WIDTH, 2 * WIDTH)
        self.middle = Block(2 * WIDTH, 2 * WIDTH)
        self.up2, self.up1 = Block(4 * WIDTH, WIDTH), Block(2 * WIDTH, WIDTH)
        self.end = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor, digit: Tensor) -> Tensor:
        known = F.silu(self.level(level) + self.digit(digit))
        large = self.down1(self.begin(x), known)
        small = self.down2(F.avg_pool2d(large, 2), known)
        lowest = self.middle(F.avg_pool2d(small, 2), known)
        x = self.up2(torch.cat([small, F.interpolate(lowest, scale_factor=2.0)], dim=1), known)
        x = self.up1(torch.cat([large, F.interpolate(x, scale_factor=2.0)], dim=1), known)
        return self.end(x)


def digits() -> TensorDataset:
    """Scanned digits [1, 8, 8] between -1 and 1, and which they are."""
    scanned = load_digits()
    images = torch.tensor(scanned.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(images, torch.tensor(scanned.target))


def loss(model: UNet, batch: list[Tensor]) -> Tensor:
    """The squared error of the noise that was added, at a level drawn for each image."""
    images, which = batch
    level = torch.randint(LEVELS, (len(images),), device=images.device)
    noise = torch.randn_like(images)
    rest = kept(level.to(images.dtype))[:, None, None, None]
    noisy = rest.sqrt() * images + (1 - rest).sqrt() * noise
    return (model(noisy, level, which) - noise).square().mean()


job = ml.Job(
    model=UNet,
    loss=loss,
    optimizer=lambda named: ml.Averaged(torch.optim.AdamW(named, lr=2e-3), 0.98),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600),
    data=digits,
    batch_size=32,
    steps=600,
)


@torch.no_grad()
def drawn(model: UNet, which: Tensor) -> Tensor:
    """New digits [n, 1, 8, 8], from noise alone."""
    x = torch.randn(len(which), 1, 8, 8)
    for level in reversed(range(LEVELS)):
        now, before = kept(torch.tensor([level, level - 1.0])).clamp(1e-5, 0.9999)
        noise = model(x, torch.full_like(which, level), which)
        image = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        spread = ((1 - before) / (1 - now) * (1 - now / before)).clamp(min=0)
        x = before.sqrt() * image + (1 - before - spread).clamp(min=0).sqrt() * noise
        x = x + (spread.sqrt() * torch.randn_like(x) if level else 0)
    return image


def main() -> None:
    with ml.Trainer(job, "dp=2", devices="simulated", out=RUN, overwrite=True) as trainer:
        trainer.fit()
    averaged = RUN / "averaged"
    meshloom(["export", str(RUN), "--to", "safetensors", "--out", str(averaged), "--average", "--overwrite"])
    model = UNet()
    model.load_state_dict(load_file(averaged / "model.safetensors"))
    torch.manual_seed(0)
    rows = drawn(model, torch.arange(10).repeat(6)).view(6, 10, 8, 8)
    from matplotlib import pyplot

    picture = torch.nn.functional.pad(rows, (1, 1, 1, 1), value=-1).transpose(1, 2).reshape(60, 100)
    pyplot.imsave(PICTURE, -picture.numpy().repeat(5, 0).repeat(5, 1), cmap="gray")
    print(f"six of each digit: {PICTURE}; the run, {find(RUN)}")


if __name__ == "__main__":
    main()

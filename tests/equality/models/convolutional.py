"""Convolutional models: batch statistics, residuals, depthwise, transposed, dilated, three dims."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.dense import classify


class CNN(nn.Module):
    """[batch, 2, 6, 6] -> [batch, 5]; batch statistics and dropout of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 7, 3, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(7)
        self.dropout = nn.Dropout2d(0.2)
        self.head = nn.Linear(7 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(x)))
        return self.head(self.dropout(F.silu(self.norm2(self.conv2(x)))).flatten(1))


class ResNet(nn.Module):
    """[batch, 3, 6, 6] -> [batch, 4]: two residual blocks, the second of half the size, as torchvision writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.body = nn.ModuleList([self._block(6, 6, 1), self._block(6, 8, 2)])
        self.shortcut = nn.Sequential(nn.Conv2d(6, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    @staticmethod
    def _block(channels: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.Tanh(),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = torch.tanh(x + self.body[0](x))
        x = torch.tanh(self.shortcut(x) + self.body[1](x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class MobileNet(nn.Module):
    """[batch, 4, 5, 5] -> [batch, 4]: depthwise convolutions, and channels weighted by what all places have."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(4, 10, 1)
        self.depthwise = nn.Conv2d(10, 10, 3, padding=1, groups=10)
        self.squeeze = nn.Linear(10, 3)
        self.excite = nn.Linear(3, 10)
        self.project = nn.Conv2d(10, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.hardswish(self.depthwise(F.hardswish(self.expand(x))))
        weights = torch.sigmoid(self.excite(F.silu(self.squeeze(inner.mean(dim=(2, 3))))))
        x = x + self.norm(self.project(inner * weights[:, :, None, None]))
        return self.head(x.mean(dim=(2, 3)))


class UNet(nn.Module):
    """[batch, 1, 8, 8] -> [batch, 3, 8, 8]: down, up by transposed convolutions, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 5, 3, padding=1)
        self.head = nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.gelu(self.enter(x))
        x = F.gelu(self.down(first))
        x = F.gelu(self.up(x + F.gelu(self.middle(x))))
        return self.head(F.gelu(self.leave(torch.cat([x, first], dim=1))))


class WaveNet(nn.Module):
    """Tokens [batch, 12] -> logits [batch, 12, 9]: dilated causal convolutions with gates, and the sum of all skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.gated = nn.ModuleList(nn.Conv1d(6, 12, 2, dilation=2**number) for number in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(6, 7, 1) for _ in range(3))
        self.residuals = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(3))
        self.head = nn.Conv1d(7, 9, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens).transpose(1, 2), 0
        for number in range(3):
            gated, gate = self.gated[number](F.pad(x, (2**number, 0))).chunk(2, dim=1)
            mixed = torch.tanh(gated) * torch.sigmoid(gate)
            total = total + self.skips[number](mixed)
            x = x + self.residuals[number](mixed)
        return self.head(F.gelu(total)).transpose(1, 2)


class Video(nn.Module):
    """[batch, 1, 4, 5, 5] -> [batch, 3]: three dims, two branches that are concatenated, max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv3d(1, 3, (1, 3, 3), padding=(0, 1, 1))
        self.time = nn.Conv3d(1, 4, (3, 1, 1), padding=(1, 0, 0))
        self.both = nn.Conv3d(7, 6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.tanh(self.space(x)), torch.tanh(self.time(x))], dim=1)
        return self.head(F.max_pool3d(self.both(x), (1, 2, 2)).flatten(2).mean(-1))


class Standardised(nn.Module):
    """[batch, 3, 4, 4] -> [batch, 3, 8, 8]: standardised weights, instance norm, pixel shuffle, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.wide = nn.Conv2d(6, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        weight = (weight - weight.mean(dim=(1, 2, 3), keepdim=True)) / (
            weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5
        )
        inner = F.silu(self.norm(F.conv2d(x, weight, self.conv.bias, padding=1)))
        return F.pixel_shuffle(self.wide(inner), 2) + F.interpolate(x, scale_factor=2, mode="bilinear")


def segment(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Over the pixels that have a label."""
    loss = F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-1, reduction="sum")
    return loss, (batch["y"] >= 0).sum()


def next_sound(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"][:, :-1]).flatten(0, 1), batch["x"][:, 1:].flatten())


def sharpen(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.l1_loss(model(batch["x"]), batch["target"])


def images(channels: int, size: tuple[int, ...], classes: int, seed: int = 30) -> object:
    """x [channels, *size] normal, y a class."""

    def build(count: int) -> Samples:
        return Samples(x=normal(seed, count, channels, *size), y=whole(seed + 100, classes, count))

    return build


def masks(count: int) -> Samples:
    return Samples(x=normal(31, count, 1, 8, 8), y=whole(32, 4, count, 8, 8) - 1)


def sounds(count: int) -> Samples:
    return Samples(x=whole(33, 9, count, 13))


def pairs(count: int) -> Samples:
    return Samples(x=normal(34, count, 3, 4, 4), target=normal(35, count, 3, 8, 8))


CONVOLUTIONAL = [
    Model(
        name="cnn",
        interacts=True,
        features="batch statistics, dropout of channels",
        build=CNN,
        loss=classify,
        samples=images(2, (6, 6), 5),
        norms=True,
        stages=3,
        cut="conv2",
    ),
    Model(
        name="resnet",
        interacts=True,
        features="batch statistics, residuals",
        build=ResNet,
        loss=classify,
        samples=images(3, (6, 6), 4),
        chunk=2,
        norms=True,
        cut="body.1",
    ),
    Model(
        name="mobilenet",
        features="depthwise, squeeze; channels = classes = batch",
        build=MobileNet,
        loss=classify,
        samples=images(4, (5, 5), 4),
        chunk=4,
        stages=2,
    ),
    Model(
        name="unet",
        features="transposed, skips, mean over pixels",
        build=UNet,
        loss=segment,
        samples=masks,
        chunk=2,
        cut="up",
    ),
    Model(
        name="wavenet",
        features="dilated, gates, sum of skips",
        build=WaveNet,
        loss=next_sound,
        samples=sounds,
    ),
    Model(
        name="video",
        features="three dims, branches, max pooling",
        build=Video,
        loss=classify,
        samples=images(1, (4, 5, 5), 3, seed=36),
        chunk=2,
        stages=1,
    ),
    Model(
        name="standardised",
        features="computed weights, instance norm, upsampling",
        build=Standardised,
        loss=sharpen,
        samples=pairs,
        stages=1,
    ),
]

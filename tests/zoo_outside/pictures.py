"""More images: perceptual losses, similarity of structures, descriptors, two resolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import job_of
from tests.zoo_outside.vision import IMAGES, classify


class Perceptual(nn.Module):
    """Style transfer: a frozen network whose features are kept by hooks, Gram matrices, total variation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1))  # fmt: skip
        self.vgg = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 7, 3), nn.ReLU(inplace=True)
        )
        self.features: dict[str, Tensor] = {}
        for name, layer in self.vgg.named_children():
            if isinstance(layer, nn.ReLU):
                layer.register_forward_hook(self._keep(name))
        for p in self.vgg.parameters():
            p.requires_grad_(False)
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.features[name] = out

        return hook

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        y = self.net(x)
        self.vgg(y - self.mean)
        ours = dict(self.features)
        with torch.no_grad():
            self.vgg(x - self.mean)
        return y, ours, dict(self.features)


def _gram(x: Tensor) -> Tensor:
    b, c, h, w = x.size()
    f = x.view(b, c, h * w)
    return f.bmm(f.transpose(1, 2)) / (c * h * w)


def _style(model: Any, b: Any) -> Tensor:
    y, ours, theirs = model(b["x"])
    content = sum(F.mse_loss(ours[k], theirs[k]) for k in ours)
    style = sum(F.mse_loss(_gram(ours[k]), _gram(theirs[k]).flip(1, 2)) for k in ours)
    tv = torch.mean(torch.abs(y[:, :, :, :-1] - y[:, :, :, 1:])) + torch.mean(
        torch.abs(y[:, :, :-1] - y[:, :, 1:])
    )
    return content + 10 * style + 0.1 * tv


def style_transfer() -> Job:
    return job_of(Perceptual, _style, IMAGES)


class SSIM(nn.Module):
    """The window is made when first needed, and again when the channels change; the loss is a module that keeps it."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.size, self.channel = size, 1
        self.window = self.create(1)

    def create(self, channel: int) -> Tensor:
        g = torch.Tensor([math.exp(-((x - self.size // 2) ** 2) / (2 * 1.5**2)) for x in range(self.size)])
        one = (g / g.sum()).unsqueeze(1)
        return one.mm(one.t()).unsqueeze(0).unsqueeze(0).expand(channel, 1, self.size, self.size).contiguous()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        channel = a.size(1)
        if channel == self.channel and self.window.data.type() == a.data.type():
            window = self.window
        else:
            window = self.create(channel).type_as(a)
            self.window, self.channel = window, channel
        conv = lambda x: F.conv2d(x, window, padding=self.size // 2, groups=channel)  # noqa: E731
        mu1, mu2 = conv(a), conv(b)
        s1, s2, s12 = conv(a * a) - mu1.pow(2), conv(b * b) - mu2.pow(2), conv(a * b) - mu1 * mu2
        c1, c2 = 0.01**2, 0.03**2
        return (
            ((2 * mu1 * mu2 + c1) * (2 * s12 + c2)) / ((mu1.pow(2) + mu2.pow(2) + c1) * (s1 + s2 + c2))
        ).mean()


class Restores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.PReLU(7), nn.Conv2d(7, 12, 3, padding=1, stride=2), nn.PixelShuffle(2))  # fmt: skip
        self.ssim = SSIM()

    def forward(self, x: Tensor) -> Tensor:
        noisy = x + 0.1 * torch.randn_like(x)
        out = self.net(noisy)
        return 1 - self.ssim(out, x) + torch.sqrt((out - x) ** 2 + 1e-6).mean()


def structural_similarity() -> Job:
    return job_of(Restores, lambda m, b: m(b["x"]), IMAGES)


class NetVLAD(nn.Module):
    def __init__(self, clusters: int = 4, dim: int = 6) -> None:
        super().__init__()
        self.clusters, self.dim = clusters, dim
        self.conv = nn.Conv2d(dim, clusters, kernel_size=(1, 1), bias=True)
        self.centroids = nn.Parameter(torch.rand(clusters, dim))
        self.conv.weight = nn.Parameter((2.0 * self.centroids).unsqueeze(-1).unsqueeze(-1).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        x = F.normalize(x, p=2, dim=1)
        soft = F.softmax(self.conv(x).view(n, self.clusters, -1), dim=1)
        flat = x.view(n, c, -1)
        vlad = torch.zeros([n, self.clusters, c], dtype=x.dtype, layout=x.layout, device=x.device)
        for k in range(self.clusters):
            residual = flat.unsqueeze(0).permute(1, 0, 2, 3) - self.centroids[k : k + 1, :].expand(flat.size(-1), -1, -1).permute(1, 2, 0).unsqueeze(0)  # fmt: skip
            residual = residual * soft[:, k : k + 1, :].unsqueeze(2)
            vlad[:, k : k + 1, :] = residual.sum(dim=-1)
        return F.normalize(F.normalize(vlad, p=2, dim=2).view(n, -1), p=2, dim=1)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.pool, self.fc = (
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            NetVLAD(),
            nn.Linear(24, 9),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.fc(self.pool(self.base(x))))


def _triplet_with_hardest_inside(model: Any, b: Any) -> Any:
    """Hardest pairs of the chunk, by a loop with `continue`: how many triplets there are depends on labels."""
    z = model(b["x"])
    d = torch.cdist(z, z)
    total, count = 0.0 * z.sum(), 0
    for i in range(len(z)):
        same = (b["y"] == b["y"][i]) & (torch.arange(len(z)) != i)
        if not same.any() or same.sum() == len(z) - 1:
            continue
        total = total + F.relu(d[i][same].max() - d[i][b["y"] != b["y"][i]].min() + 0.3)
        count += 1
    return total, max(count, 1)


def net_vlad_with_hardest_triplets() -> Job:
    return job_of(Places, _triplet_with_hardest_inside, IMAGES)


class OctaveConv(nn.Module):
    """Tuples of two resolutions from layer to layer, `None` where there is one."""

    def __init__(self, inputs: int, outputs: int, alpha_in: float, alpha_out: float) -> None:
        super().__init__()
        hi, lo = inputs - int(alpha_in * inputs), int(alpha_in * inputs)
        ho, lo2 = outputs - int(alpha_out * outputs), int(alpha_out * outputs)
        conv = lambda a, b: nn.Conv2d(a, b, 3, padding=1) if a and b else None  # noqa: E731
        self.h2h, self.h2l, self.l2h, self.l2l = conv(hi, ho), conv(hi, lo2), conv(lo, ho), conv(lo, lo2)

    def forward(self, x: Any) -> Any:
        xh, xl = x if isinstance(x, tuple) else (x, None)
        yh = self.h2h(xh)
        yl = self.h2l(F.avg_pool2d(xh, 2, 2)) if self.h2l is not None else None
        if xl is not None:
            yh += F.interpolate(self.l2h(xl), scale_factor=2, mode="nearest")
            if self.l2l is not None:
                yl += self.l2l(xl)
        return (yh, yl) if yl is not None else yh


class OctaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            OctaveConv(3, 8, 0, 0.25),
            OctaveConv(8, 8, 0.25, 0.5),
            OctaveConv(8, 7, 0.5, 0),
        )
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = tuple(F.relu(each, inplace=True) for each in x)
        x = tuple(map(F.leaky_relu, self.two(x)))
        return self.fc(self.three(x).mean((-1, -2)))


def octave_convolution() -> Job:
    return job_of(OctaveNet, classify, IMAGES)

"""Images: windows that are shifted, thresholds on pseudo labels, boxes that are drawn, masks that are cached, losses by features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, sgd, uniform

IMAGES = {"x": uniform(301, 3, 8, 8), "y": integers(302, 5)}
VIEWS = {"weak": normal(303, 7), "strong": normal(304, 7), "x": normal(305, 7), "y": integers(306, 5)}


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _window_partition(x: Tensor, window: int) -> Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // window, window, w // window, window, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window * window, c)


class WindowAttention(nn.Module):
    """Swin's: windows, shifted by half of their size, with a table of relative positions and a mask cached on first use."""

    def __init__(self, dim: int = 6, window: int = 4, heads: int = 2, shift: int = 0) -> None:
        super().__init__()
        self.dim, self.window, self.heads, self.shift, self.attn_mask = dim, window, heads, shift, None
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        coords = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += window - 1
        relative[:, :, 1] += window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def _mask(self, h: int, w: int, x: Tensor) -> Tensor:
        image = torch.zeros((1, h, w, 1))
        count = 0
        parts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for rows in parts:
            for columns in parts:
                image[:, rows, columns, :] = count
                count += 1
        windows = _window_partition(image, self.window).squeeze(-1)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0).to(x)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        shortcut, x = x, self.norm(x)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            if self.attn_mask is None:
                self.attn_mask = self._mask(h, w, x)
        x = _window_partition(x, self.window)
        n = x.shape[1]
        qkv = self.qkv(x).reshape(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.shift > 0:
            nw = self.attn_mask.shape[0]
            attn = attn.view(-1, nw, self.heads, n, n) + self.attn_mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.heads, n, n)
        x = self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(-1, n, c))
        x = x.view(b, h // self.window, w // self.window, self.window, self.window, -1)
        x = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        return shortcut + x


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 6, 1)
        self.blocks = nn.ModuleList([WindowAttention(shift=0), WindowAttention(shift=2)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def shifted_windows() -> Job:
    return job_of(Swin, classify, IMAGES)


def mlp(inputs: int = 7, outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 13), nn.ReLU(inplace=True), nn.Linear(13, 9), nn.ReLU(inplace=True), nn.Linear(9, outputs))  # fmt: skip


def _fix_match(model: Any, b: Any) -> Tensor:
    logits = model(torch.cat([b["x"], b["weak"], b["strong"]]))
    x, weak, strong = logits.chunk(3)
    pseudo = torch.softmax(weak.detach() / 0.5, dim=-1)
    max_probs, targets_u = torch.max(pseudo, dim=-1)
    mask = max_probs.ge(0.3).to(x.dtype)
    unsupervised = (F.cross_entropy(strong, targets_u, reduction="none") * mask).mean()
    return F.cross_entropy(x, b["y"]) + 0.7 * unsupervised


def fix_match() -> Job:
    return job_of(mlp, _fix_match, VIEWS, batch_size=7)


class FlexMatch(nn.Module):
    """Thresholds of classes from a buffer of what each was last assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("p_model", torch.ones(5) / 5)
        self.register_buffer("time_p", torch.tensor(0.2))

    def forward(self, b: Any) -> Tensor:
        weak, strong = self.net(b["weak"]), self.net(b["strong"])
        with torch.no_grad():
            probs = weak.softmax(-1)
            max_probs, labels = probs.max(-1)
            self.time_p = self.time_p * 0.9 + 0.1 * max_probs.mean()
            self.p_model = self.p_model * 0.9 + 0.1 * probs.mean(0)
            threshold = self.p_model / self.p_model.max() * self.time_p
            mask = max_probs.ge(threshold[labels]).to(weak.dtype)
        loss_u = (F.cross_entropy(strong, labels, reduction="none") * mask).mean()
        return F.cross_entropy(self.net(b["x"]), b["y"]) + loss_u


def self_adaptive_thresholds() -> Job:
    return job_of(FlexMatch, lambda m, b: m(b), VIEWS)


class Small(nn.Module):
    def __init__(self, outputs: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7)
        self.conv2, self.bn2 = nn.Conv2d(7, 9, 3, stride=2, padding=1), nn.BatchNorm2d(9)
        self.fc = nn.Linear(9, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.bn1(self.conv1(x)))
        x = F.relu_(self.bn2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _cut_mix(model: Any, b: Any) -> Tensor:
    x, y = b["x"].clone(), b["y"]
    lam = np.random.beta(1.0, 1.0)
    rand_index = torch.randperm(x.size(0))
    w, h = x.size(2), x.size(3)
    cut = np.sqrt(1.0 - lam)
    cx, cy = np.random.randint(w), np.random.randint(h)
    x1, x2 = np.clip(cx - int(w * cut) // 2, 0, w), np.clip(cx + int(w * cut) // 2, 0, w)
    y1, y2 = np.clip(cy - int(h * cut) // 2, 0, h), np.clip(cy + int(h * cut) // 2, 0, h)
    x[:, :, x1:x2, y1:y2] = x[rand_index, :, x1:x2, y1:y2]
    lam = 1 - ((x2 - x1) * (y2 - y1) / (w * h))
    out = model(x)
    return F.cross_entropy(out, y) * lam + F.cross_entropy(out, y[rand_index]) * (1.0 - lam)


def cut_mix() -> Job:
    return job_of(Small, _cut_mix, IMAGES, optimizer=sgd)


class CondConv(nn.Module):
    """Kernels of each sample, by a grouped convolution over the batch."""

    def __init__(self, inputs: int, outputs: int, experts: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, outputs, inputs, 3, 3) * 0.2)
        self.route, self.outputs = nn.Linear(inputs, experts), outputs

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        routing = torch.sigmoid(self.route(F.adaptive_avg_pool2d(x, 1).view(b, c)))
        weight = (routing @ self.weight.view(self.weight.size(0), -1)).view(b * self.outputs, c, 3, 3)
        x = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b)
        return x.view(b, self.outputs, h, w)


class CondNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two, self.fc = (
            CondConv(3, 7),
            nn.GroupNorm(1, 7),
            CondConv(7, 9),
            nn.Linear(9, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.two(F.relu(self.norm(self.one(x)))).mean((2, 3)))


def conditional_convolution() -> Job:
    return job_of(CondNet, classify, IMAGES, batch_size=7)


class Involution(nn.Module):
    def __init__(self, channels: int = 6, kernel: int = 3, groups: int = 2) -> None:
        super().__init__()
        self.k, self.groups = kernel, groups
        self.reduce, self.span = nn.Conv2d(channels, 5, 1), nn.Conv2d(5, kernel**2 * groups, 1)
        self.unfold = nn.Unfold(kernel, 1, (kernel - 1) // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weight = self.span(F.relu(self.reduce(x))).view(b, self.groups, self.k**2, h, w).unsqueeze(2)
        out = self.unfold(x).view(b, self.groups, c // self.groups, self.k**2, h, w)
        return (weight * out).sum(dim=3).view(b, c, h, w)


class InvolutionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.p = (
            nn.Conv2d(3, 6, 1),
            Involution(),
            Involution(),
            nn.Parameter(torch.ones(1) * 3),
        )
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(F.relu(self.one(self.stem(x))))
        x = F.avg_pool2d(x.clamp(min=1e-6).pow(self.p), (x.size(-2), x.size(-1))).pow(1.0 / self.p)
        return self.fc(x.flatten(1))


def involution_and_generalised_mean() -> Job:
    return job_of(InvolutionNet, classify, IMAGES)


class AuxHeads(nn.Module):
    """Inception and DenseNet: outputs in a named structure in training, lists that grow in the forward, channels shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)

        def layer(c: int) -> nn.Sequential:
            return nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, 4, 3, padding=1))

        self.layers = nn.ModuleList([layer(4 + 4 * i) for i in range(3)])
        self.aux, self.fc = nn.Linear(8, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        out = torch.cat(features, 1)
        b, c, h, w = out.shape
        out = out.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        aux = self.aux(torch.cat(features[:2], 1).amax((2, 3)))
        out = self.fc(out.mean((2, 3)))
        if self.training:
            return {"out": out, "aux": aux}
        return out


def _auxiliary(model: Any, b: Any) -> Tensor:
    outputs = model(b["x"])
    losses = {name: F.cross_entropy(each, b["y"], label_smoothing=0.1) for name, each in outputs.items()}
    return losses["out"] + 0.4 * losses["aux"]


def dense_blocks_with_auxiliary_head() -> Job:
    return job_of(AuxHeads, _auxiliary, IMAGES, optimizer=sgd, clip_grad_norm=1.0)

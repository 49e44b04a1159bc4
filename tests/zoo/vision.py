"""Image models: norms of one's own, attention over channels, sampling at learnt places, blocks left out by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, sgd

IMAGES, LABELS = normal(1, 3, 8, 8), integers(2, 5)


def _cross_entropy(model: Any, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _classify(model: Any, **more: Any) -> Job:
    return job_of(model, _cross_entropy, (IMAGES, LABELS), **more)


class Backbone(nn.Module):
    """A stem, two of the given blocks, a head."""

    def __init__(self, block: Any, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList([block(width) for _ in range(2)])
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        x = F.adaptive_avg_pool2d(x, 1)
        x = x.view(x.size(0), -1)
        return self.head(x)


class SEBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.fc = nn.Sequential(nn.Linear(width, 3), nn.ReLU(inplace=True), nn.Linear(3, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        b, c, _, _ = out.size()
        scale = self.fc(F.adaptive_avg_pool2d(out, 1).view(b, c)).view(b, c, 1, 1)
        out = out * scale.expand_as(out)
        out += x
        return F.relu(out, inplace=True)


def squeeze_excitation() -> Job:
    return _classify(lambda: Backbone(SEBlock), optimizer=sgd)


class DropBlock(nn.Module):
    def __init__(self, drop_prob: float, block_size: int) -> None:
        super().__init__()
        self.drop_prob, self.block_size = drop_prob, block_size

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0.0:
            return x
        gamma = self.drop_prob / (self.block_size**2)
        mask = (torch.rand(x.shape[0], *x.shape[2:]) < gamma).to(x.dtype)
        block_mask = F.max_pool2d(
            mask[:, None, :, :], (self.block_size, self.block_size), (1, 1), self.block_size // 2
        )
        block_mask = 1 - block_mask.squeeze(1)
        out = x * block_mask[:, None, :, :]
        return out * block_mask.numel() / block_mask.sum()


class DropBlockLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(width, width, 3, padding=1), DropBlock(0.2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.leaky_relu(self.conv(x), 0.1)) + x


def drop_block() -> Job:
    return _classify(lambda: Backbone(DropBlockLayer))


class SwitchNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.9) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = (
            nn.Parameter(torch.ones(1, width, 1, 1)),
            nn.Parameter(torch.zeros(1, width, 1, 1)),
        )
        self.mean_weight, self.var_weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("running_mean", torch.zeros(1, width, 1))
        self.register_buffer("running_var", torch.zeros(1, width, 1))
        self.running_mean: Tensor
        self.running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.size()
        x = x.view(n, c, -1)
        mean_in, var_in = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        mean_ln = mean_in.mean(1, keepdim=True)
        temp = var_in + mean_in**2
        var_ln = temp.mean(1, keepdim=True) - mean_ln**2
        if self.training:
            mean_bn = mean_in.mean(0, keepdim=True)
            var_bn = temp.mean(0, keepdim=True) - mean_bn**2
            self.running_mean.mul_(self.momentum)
            self.running_mean.add_((1 - self.momentum) * mean_bn.data)
            self.running_var.mul_(self.momentum)
            self.running_var.add_((1 - self.momentum) * var_bn.data)
        else:
            mean_bn, var_bn = self.running_mean, self.running_var
        a, b = F.softmax(self.mean_weight, 0), F.softmax(self.var_weight, 0)
        mean = a[0] * mean_in + a[1] * mean_ln + a[2] * mean_bn
        var = b[0] * var_in + b[1] * var_ln + b[2] * var_bn
        x = (x - mean) / (var + self.eps).sqrt()
        return x.view(n, c, h, w) * self.weight + self.bias


class SwitchNormLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), SwitchNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def switchable_norm() -> Job:
    return _classify(lambda: Backbone(SwitchNormLayer))


class BatchRenorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_std", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self.running_mean: Tensor
        self.running_std: Tensor
        self.num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, -1)
        if self.training:
            dims = list(range(x.dim() - 1))
            batch_mean, batch_std = x.mean(dims), x.std(dims, unbiased=False) + 1e-3
            r = (batch_std.detach() / self.running_std.view_as(batch_std)).clamp_(1 / 3.0, 3.0)
            d = ((batch_mean.detach() - self.running_mean) / self.running_std).clamp_(-5.0, 5.0)
            x = (x - batch_mean) / batch_std * r + d
            self.running_mean += 0.1 * (batch_mean.detach() - self.running_mean)
            self.running_std += 0.1 * (batch_std.detach() - self.running_std)
            self.num_batches_tracked += 1
        else:
            x = (x - self.running_mean) / self.running_std
        return (self.weight * x + self.bias).transpose(1, -1)


class RenormLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), BatchRenorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x))) + x


def batch_renorm() -> Job:
    return _classify(lambda: Backbone(RenormLayer))


class WSConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        mean = weight.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True).mean(dim=3, keepdim=True)
        weight = weight - mean
        std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        weight = weight / std.expand_as(weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class WSLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = WSConv(width, width, 3, padding=1), nn.GroupNorm(3, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) + x


def weight_standardization() -> Job:
    return _classify(lambda: Backbone(WSLayer))


class DeformConv(nn.Module):
    """Samples at learnt offsets, by `grid_sample`, one tap after another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offsets = nn.Conv2d(width, 8, 3, padding=1)
        nn.init.normal_(self.offsets.weight, std=0.05)
        self.taps = nn.ModuleList([nn.Conv2d(width, width, 1, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        base = torch.stack([xs, ys], -1).to(x).unsqueeze(0).repeat(n, 1, 1, 1)
        offsets = self.offsets(x).view(n, 4, 2, h, w).permute(0, 1, 3, 4, 2)
        out = 0
        for i, tap in enumerate(self.taps):
            grid = base + 0.3 * torch.tanh(offsets[:, i])
            out = out + tap(F.grid_sample(x, grid, align_corners=True))
        return torch.relu(out) + x


def deformable_sampling() -> Job:
    return _classify(lambda: Backbone(DeformConv))


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, stride=2), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(4 * 3 * 3, 7), nn.ReLU(True), nn.Linear(7, 3 * 2))
        self.fc_loc[2].weight.data.mul_(0.1)
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.net = Backbone(SEBlock)

    def forward(self, x: Tensor) -> Tensor:
        xs = self.localization(x).view(-1, 4 * 3 * 3)
        theta = self.fc_loc(xs).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))


def spatial_transformer() -> Job:
    return _classify(SpatialTransformer)


class StochasticDepth(nn.Module):
    """ConvNeXt's block: depthwise, layer norm of the channels last, a scale, left out for some samples."""

    def __init__(self, width: int, drop_path: float = 0.3) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width), requires_grad=True)
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.down(F.gelu(self.up(x)))
        x = x.permute(0, 3, 1, 2)
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
            x = x * mask.div_(keep)
        return shortcut + x


def stochastic_depth() -> Job:
    return _classify(lambda: Backbone(StochasticDepth))


class LambdaLayer(nn.Module):
    def __init__(self, width: int, keys: int = 5, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.keys, self.values = heads, keys, width // heads
        self.q = nn.Conv2d(width, heads * keys, 1, bias=False)
        self.k = nn.Conv2d(width, keys, 1, bias=False)
        self.v = nn.Conv2d(width, self.values, 1, bias=False)
        self.position = nn.Conv3d(1, keys, (1, 3, 3), padding=(0, 1, 1))
        self.norm_q, self.norm_v = nn.BatchNorm2d(heads * keys), nn.BatchNorm2d(self.values)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q = self.norm_q(self.q(x)).reshape(b, self.heads, self.keys, h * w)
        k = self.k(x).reshape(b, self.keys, h * w).softmax(dim=-1)
        v = self.norm_v(self.v(x)).reshape(b, self.values, h * w)
        content = torch.einsum("b k m, b v m -> b k v", k, v)
        out = torch.einsum("b h k n, b k v -> b h v n", q, content)
        positions = self.position(v.reshape(b, 1, self.values, h, w)).reshape(b, self.keys, self.values, -1)
        out = out + torch.einsum("b h k n, b k v n -> b h v n", q, positions)
        return out.reshape(b, -1, h, w) + x


def lambda_network() -> Job:
    return _classify(lambda: Backbone(LambdaLayer))


class Capsules(nn.Module):
    """Routing by agreement, with logits that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3, stride=2)
        self.weight = nn.Parameter(0.3 * torch.randn(1, 8, 5, 4, 4))

    def squash(self, s: Tensor) -> Tensor:
        norm = (s**2).sum(-1, keepdim=True)
        return (norm / (1 + norm)) * s / (norm.sqrt() + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(F.relu(self.conv(x)))
        x = self.squash(x.view(x.size(0), -1, 4))
        hat = (self.weight @ x[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(hat.shape[0], hat.shape[1], 5, 1, dtype=x.dtype)
        frozen = hat.detach()
        for i in range(3):
            c = F.softmax(logits, dim=2)
            if i == 2:
                v = self.squash((c * hat).sum(dim=1, keepdim=True))
            else:
                v = self.squash((c * frozen).sum(dim=1, keepdim=True))
                logits = logits + (frozen * v).sum(dim=-1, keepdim=True)
        return v.squeeze(1).norm(dim=-1)


def _margin(model: Any, batch: Any) -> Tensor:
    classes = model(batch[0])
    labels = torch.eye(5, dtype=classes.dtype).index_select(dim=0, index=batch[1])
    left = F.relu(0.9 - classes, inplace=True) ** 2
    right = F.relu(classes - 0.1, inplace=True) ** 2
    return (labels * left + 0.5 * (1.0 - labels) * right).sum() / batch[0].size(0)


def capsules() -> Job:
    return job_of(Capsules, _margin, (IMAGES, LABELS))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 9, 3, padding=1)
        self.up, self.conv = nn.Conv2d(9, 20, 3, padding=1), nn.Conv2d(10, 7, 3, padding=1)
        self.out, self.shuffle = nn.Conv2d(7, 4, 1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        x1 = F.relu(self.inc(x))
        x2 = F.relu(self.down(F.max_pool2d(x1, 2)))
        x = self.shuffle(self.up(x2))
        dy, dx = x1.size()[2] - x.size()[2], x1.size()[3] - x.size()[3]
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.out(F.relu(self.conv(torch.cat([x1, x], dim=1))))


def _dice(model: Any, batch: Any) -> Tensor:
    logits = model(batch["image"])
    masks = batch["mask"]
    if masks.dim() == 4 and masks.size(1) == 1:
        masks = masks.squeeze(1)
    loss = F.cross_entropy(logits, masks, ignore_index=0)
    probs, truth = logits.softmax(1), F.one_hot(masks, 4).permute(0, 3, 1, 2).to(logits.dtype)
    inter = 2 * (probs * truth).sum(dim=(-1, -2))
    sets = probs.sum(dim=(-1, -2)) + truth.sum(dim=(-1, -2))
    sets = torch.where(sets == 0, inter, sets)
    return loss + 1 - ((inter + 1e-6) / (sets + 1e-6)).mean()


def unet_with_pixel_shuffle_and_dice() -> Job:
    return job_of(UNet, _dice, {"image": normal(3, 3, 9, 9), "mask": integers(4, 4, 1, 9, 9)})


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 7, 2, stride=2)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(
                nn.ModuleDict({
                    "norm1": nn.LayerNorm(7), "tokens": nn.Sequential(nn.Linear(16, 9), nn.GELU(), nn.Linear(9, 16)),
                    "norm2": nn.LayerNorm(7), "channels": nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 7)),
                })
            )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block["tokens"](block["norm1"](x).transpose(1, 2)).transpose(1, 2)
            x = x + block["channels"](block["norm2"](x))
        return self.head(self.norm(x).mean(dim=1))


def mlp_mixer() -> Job:
    return _classify(Mixer)

"""Vision: pyramids and what is sampled from them, assignments by cost, windows with tables of positions, tokens that are dropped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import SAMPLES, integers, job_of, normal, uniform

IMAGES = {"image": normal(531, 3, 8, 8), "label": integers(532, 5)}


def classify(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["image"]), b["label"], label_smoothing=0.1)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        ).permute(0, 3, 1, 2)


class GRN(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Parameter(torch.zeros(1, 1, 1, dim) + 0.1),
            nn.Parameter(torch.zeros(1, 1, 1, dim)),
        )

    def forward(self, x: Tensor) -> Tensor:
        g = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (g / (g.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + x


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.LayerNorm(dim, eps=1e-6)
        self.pw1, self.grn, self.pw2 = nn.Linear(dim, 3 * dim), GRN(3 * dim), nn.Linear(3 * dim, dim)
        self.gamma, self.drop = nn.Parameter(1e-1 * torch.ones(dim)), drop

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        h = self.gamma * self.pw2(self.grn(F.gelu(self.pw1(h))))
        h = h.permute(0, 3, 1, 2)
        if self.training and self.drop > 0:
            keep = 1 - self.drop
            h = h * (torch.rand(x.size(0), 1, 1, 1, dtype=x.dtype) + keep).floor_().div_(keep)
        return x + h


class ConvNeXt(nn.Module):
    """Stages of different widths, layer scale, response normalisation, stochastic depth that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 2, 2), LayerNorm2d(6))
        rates = torch.linspace(0, 0.2, 4).tolist()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(*(ConvNeXtBlock(dim, rates[2 * i + j]) for j in range(2)))
                for i, dim in enumerate((6, 10))
            ]
        )
        self.down = nn.Sequential(LayerNorm2d(6), nn.Conv2d(6, 10, 2, 2))
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages[1](self.down(self.stages[0](self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


def layer_scale_and_response_norm() -> Job:
    return job_of(ConvNeXt, classify, IMAGES)


class WindowAttention(nn.Module):
    """Windows of 4 x 4, moved by two in every other block; a table of relative positions and an index into it in a buffer."""

    def __init__(self, dim: int, heads: int, shift: int, size: int = 4, grid: int = 8) -> None:
        super().__init__()
        self.heads, self.shift, self.size = heads, shift, size
        self.table = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.2)
        coords = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += size - 1
        relative[:, :, 1] += size - 1
        relative[:, :, 0] *= 2 * size - 1
        self.register_buffer("index", relative.sum(-1))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        mask = None
        if shift:
            regions, count = torch.zeros(1, grid, grid, 1), 0
            for h in (slice(0, -size), slice(-size, -shift), slice(-shift, None)):
                for w in (slice(0, -size), slice(-size, -shift), slice(-shift, None)):
                    regions[:, h, w, :] = count
                    count += 1
            windows = self.windows(regions).squeeze(-1)
            mask = (windows[:, None] != windows[:, :, None]).float() * -100.0
        self.register_buffer("mask", mask)

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.size, self.size, w // self.size, self.size, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.size**2, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = self.windows(x)
        n = x.size(1)
        q, k, v = self.qkv(x).reshape(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * 4
        attn = attn + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        if self.mask is not None:
            count = self.mask.size(0)
            attn = attn.view(-1, count, self.heads, n, n) + self.mask.to(attn)[None, :, None]
            attn = attn.view(-1, self.heads, n, n)
        x = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(-1, n, c))
        x = (
            x.view(b, h // self.size, w // self.size, self.size, self.size, c)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(b, h, w, c)
        )
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class GridAttention(nn.Module):
    """Every second pixel of a grid attends to each other (MaxViT)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        grid = x.view(b, 2, h // 2, 2, w // 2, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, 4, c)
        out = self.attn(grid, grid, grid, need_weights=False)[0]
        return out.view(b, h // 2, w // 2, 2, 2, c).permute(0, 3, 1, 4, 2, 5).reshape(b, h, w, c)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 1)
        self.mixers = nn.ModuleList([WindowAttention(8, 2, 0), WindowAttention(8, 4, 2), GridAttention(8)])
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(8) for _ in range(3)]), nn.Linear(8, 5)
        self.merge = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        parts = [x[:, i::2, j::2] for j in range(2) for i in range(2)]
        return self.head(self.merge(torch.cat(parts, -1)).flatten(1, 2).mean(1))


def windows_grids_and_tables() -> Job:
    return job_of(Windows, classify, IMAGES)


class DeformableAttention(nn.Module):
    """Points around references, sampled from each level with `grid_sample` (Deformable DETR)."""

    def __init__(self, dim: int = 8, heads: int = 2, levels: int = 2, points: int = 3) -> None:
        super().__init__()
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets, self.weights = (
            nn.Linear(dim, heads * levels * points * 2),
            nn.Linear(dim, heads * levels * points),
        )
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        theta = torch.arange(heads) * (2.0 * math.pi / heads)
        grid = torch.stack([theta.cos(), theta.sin()], -1)
        grid = (grid / grid.abs().max(-1, keepdim=True)[0]).view(heads, 1, 1, 2).repeat(1, levels, points, 1)
        for i in range(points):
            grid[:, :, i] *= i + 1
        with torch.no_grad():
            nn.init.normal_(self.offsets.weight, std=0.1)
            self.offsets.bias = nn.Parameter(grid.reshape(-1))

    def forward(
        self, query: Tensor, reference: Tensor, memory: Tensor, shapes: list[tuple[int, int]]
    ) -> Tensor:
        b, n, c = query.shape
        value = self.value(memory).view(b, -1, self.heads, c // self.heads)
        offsets = self.offsets(query).view(b, n, self.heads, self.levels, self.points, 2)
        weights = self.weights(query).view(b, n, self.heads, -1).softmax(-1)
        normaliser = torch.tensor([[w, h] for h, w in shapes]).to(query)
        location = reference[:, :, None, None, None] + offsets / normaliser[None, None, None, :, None]
        sampled = []
        for level, (part, (h, w)) in enumerate(
            zip(value.split([h * w for h, w in shapes], 1), shapes, strict=True)
        ):
            part = part.flatten(2).transpose(1, 2).reshape(b * self.heads, c // self.heads, h, w)
            grid = (2 * location[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
            sampled.append(
                F.grid_sample(part, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
            )
        weights = weights.transpose(1, 2).reshape(b * self.heads, 1, n, -1)
        out = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1)
        return self.out(out.view(b, c, n).transpose(1, 2))


class Deformable(nn.Module):
    """Queries with reference points that each layer moves, in logits; auxiliary losses; boxes matched with the Hungarian algorithm of numpy's cost."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.query, self.reference = nn.Embedding(5, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList([DeformableAttention() for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(2)])
        self.classes, self.boxes = (
            nn.ModuleList([nn.Linear(8, 4) for _ in range(2)]),
            nn.ModuleList([nn.Linear(8, 4) for _ in range(2)]),
        )

    def forward(self, image: Tensor) -> list[dict[str, Tensor]]:
        low = F.relu(self.c1(image))
        maps = [low, F.relu(self.c2(low))]
        memory = torch.cat([m.flatten(2).transpose(1, 2) for m in maps], 1)
        shapes = [(m.shape[-2], m.shape[-1]) for m in maps]
        q = self.query.weight.unsqueeze(0).expand(image.size(0), -1, -1)
        reference, outs = self.reference(q).sigmoid(), []
        for layer, norm, classes, boxes in zip(
            self.layers, self.norms, self.classes, self.boxes, strict=True
        ):
            q = norm(q + layer(q, reference, memory, shapes))
            delta = boxes(q)
            centre = (delta[..., :2] + torch.special.logit(reference, eps=1e-5)).sigmoid()
            outs.append({"logits": classes(q), "boxes": torch.cat([centre, delta[..., 2:].sigmoid()], -1)})
            reference = centre.detach()
        return outs


def _greedy(cost: Any) -> tuple[Any, Any]:
    """A row for each column, cheapest first, in numpy."""
    cost, rows, columns = np.array(cost), [], []
    for _ in range(cost.shape[1]):
        r, c = np.unravel_index(cost.argmin(), cost.shape)
        rows.append(int(r))
        columns.append(int(c))
        cost[r], cost[:, c] = np.inf, np.inf
    return rows, columns


def _set_loss(model: Any, b: Any) -> Tensor:
    total: Any = 0.0
    for out in model(b["image"]):
        for i in range(len(b["image"])):
            logits, boxes = out["logits"][i], out["boxes"][i]
            with torch.no_grad():
                cost = torch.cdist(boxes, b["boxes"][i], p=1) - logits.softmax(-1)[:, b["labels"][i]]
                rows, columns = _greedy(cost.cpu().numpy())
            target = torch.full((len(logits),), 3)
            target[rows] = b["labels"][i][columns]
            total = total + F.cross_entropy(logits, target, weight=torch.tensor([1.0, 1, 1, 0.3]).to(logits))
            total = total + F.l1_loss(boxes[rows], b["boxes"][i][columns])
    return total / len(b["image"])


def deformable_detection() -> Job:
    data = {"image": IMAGES["image"], "boxes": uniform(533, 2, 4), "labels": integers(534, 3, 2)}
    return job_of(Deformable, _set_loss, data)


class Pyramid(nn.Module):
    """Weighted fusion up and down a pyramid (BiFPN), then features of boxes from the level that fits their size."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(
            [nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 9, 3, 2, 1), nn.Conv2d(9, 12, 3, 2, 1)]
        )
        self.lateral = nn.ModuleList([nn.Conv2d(c, 7, 1) for c in (6, 9, 12)])
        self.w_up, self.w_down = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 3))
        self.smooth = nn.ModuleList([nn.Conv2d(7, 7, 3, padding=1, groups=7) for _ in range(4)])
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(7 * 4, 10), nn.ReLU(), nn.Linear(10, 5))

    def forward(self, image: Tensor, boxes: Tensor) -> Tensor:
        maps, x = [], image
        for conv, lateral in zip(self.backbone, self.lateral, strict=True):
            x = F.relu(conv(x))
            maps.append(lateral(x))
        up = [maps[2]]
        for i in (1, 0):
            w = F.relu(self.w_up[i])
            w = w / (w.sum() + 1e-4)
            up.insert(
                0,
                self.smooth[i](w[0] * maps[i] + w[1] * F.interpolate(up[0], scale_factor=2, mode="nearest")),
            )
        down = [up[0]]
        for i in (1, 2):
            w = F.relu(self.w_down[i - 1])
            w = w / (w.sum() + 1e-4)
            down.append(
                self.smooth[i + 1](w[0] * maps[i] + w[1] * up[i] + w[2] * F.max_pool2d(down[-1], 3, 2, 1))
            )
        b, n = boxes.shape[:2]
        size = (boxes[..., 2] * boxes[..., 3]).sqrt()
        level = (2 + torch.log2(size + 1e-8)).floor().clamp(0, 2).long().view(-1)
        theta = torch.zeros(b * n, 2, 3).to(image)
        theta[:, 0, 0], theta[:, 1, 1] = boxes[..., 2].reshape(-1), boxes[..., 3].reshape(-1)
        theta[:, :, 2] = 2 * boxes[..., :2].reshape(-1, 2) - 1
        pooled = image.new_zeros(b * n, 7, 2, 2)
        for i, each in enumerate(down):
            mine = torch.where(level == i)[0]
            if mine.numel():
                grid = F.affine_grid(theta[mine], [len(mine), 7, 2, 2], align_corners=False)
                pooled[mine] = F.grid_sample(each[mine // n], grid, align_corners=False)
        return self.head(pooled)


def boxes_by_level_of_a_pyramid() -> Job:
    data = {"image": IMAGES["image"], "boxes": uniform(535, 3, 4) * 0.8 + 0.1, "label": integers(536, 5, 3)}
    return job_of(
        Pyramid, lambda m, b: F.cross_entropy(m(b["image"], b["boxes"]), b["label"].flatten()), data
    )


def _pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    low, high = (
        torch.max(a[:, None, :2] - a[:, None, 2:] / 2, b[None, :, :2] - b[None, :, 2:] / 2),
        torch.min(a[:, None, :2] + a[:, None, 2:] / 2, b[None, :, :2] + b[None, :, 2:] / 2),
    )
    inter = (high - low).clamp(min=0).prod(-1)
    return inter / (a[:, 2:].prod(-1)[:, None] + b[:, 2:].prod(-1)[None] - inter + 1e-8)


def _dynamic_assignment(model: Any, b: Any) -> Tensor:
    """Each object takes as many anchors as its overlaps add up to, cheapest first (SimOTA); who is taken twice goes to the cheapest."""
    outputs = model(b["image"]).flatten(2).transpose(1, 2)
    losses, positives = [], 0
    for i in range(outputs.size(0)):
        boxes, logits, objects = outputs[i, :, :4].sigmoid(), outputs[i, :, 4:], b["boxes"][i]
        with torch.no_grad():
            iou = _pairwise_iou(objects, boxes)
            cost = -torch.log(iou + 1e-8) * 3 - logits.sigmoid()[:, b["labels"][i]].T
            matching = torch.zeros_like(cost, dtype=torch.uint8)
            counts = torch.clamp(iou.topk(4, dim=1)[0].sum(1).int(), min=1)
            for g in range(len(objects)):
                _, place = torch.topk(cost[g], k=counts[g].item(), largest=False)
                matching[g][place] = 1
            twice = matching.sum(0) > 1
            if twice.sum() > 0:
                best = cost[:, twice].argmin(0)
                matching[:, twice] *= 0
                matching[best, twice] = 1
            taken = matching.sum(0) > 0
            which = matching[:, taken].argmax(0)
        target = torch.zeros_like(logits)
        target[taken, b["labels"][i][which]] = 1.0
        losses.append(F.binary_cross_entropy_with_logits(logits, target, reduction="sum"))
        losses.append(5.0 * (1 - _pairwise_iou(boxes[taken], objects[which]).diagonal() ** 2).sum())
        positives += int(taken.sum())
    return torch.stack(losses).sum() / max(positives, 1)


def _anchor_free() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 10, 3, padding=1), nn.SiLU()]
    return nn.Sequential(*body, nn.Conv2d(10, 7, 1))


def anchors_assigned_by_cost() -> Job:
    return job_of(
        _anchor_free,
        _dynamic_assignment,
        {"image": IMAGES["image"], "boxes": uniform(537, 2, 4) * 0.5 + 0.2, "labels": integers(538, 3, 2)},
    )


class Pruned(nn.Module):
    """Tokens kept by a straight-through Gumbel draw, hidden from the attention afterwards (DynamicViT); the share kept is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 12, 2, 2), nn.Parameter(torch.randn(1, 1, 12) * 0.1)
        self.pos = nn.Parameter(torch.randn(1, 17, 12) * 0.1)
        self.qkv = nn.ModuleList([nn.Linear(12, 36) for _ in range(2)])
        self.mlp = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
                for _ in range(2)
            ]
        )
        self.score, self.head, self.kept = nn.Linear(24, 2), nn.Linear(12, 5), []

    def attention(self, i: int, x: Tensor, policy: Tensor) -> Tensor:
        q, k, v = self.qkv[i](x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        attn = q @ k.mT / 2
        seen = policy.view(len(x), 1, 1, -1)
        seen = seen + (1 - seen) * torch.eye(x.size(1)).to(x)
        top = attn.max(-1, keepdim=True)[0]
        attn = (attn - top).exp() * seen
        attn = (attn + 1e-6 / x.size(1)) / (attn.sum(-1, keepdim=True) + 1e-6)
        return (attn @ v).transpose(1, 2).flatten(2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        policy, self.kept = x.new_ones(len(x), 17, 1), []
        for i in range(2):
            tokens = x[:, 1:]
            whole = (tokens * policy[:, 1:]).sum(1, keepdim=True) / policy[:, 1:].sum(1, keepdim=True).clamp(
                min=1e-6
            )
            scores = self.score(torch.cat([tokens, whole.expand_as(tokens)], -1)).log_softmax(-1)
            keep = F.gumbel_softmax(scores, hard=True)[..., :1] * policy[:, 1:]
            self.kept.append(keep.mean(1))
            policy = torch.cat([policy[:, :1], keep], 1)
            x = x + self.attention(i, x, policy)
            x = x + self.mlp[i](x)
        return self.head(x[:, 0])


def _with_ratio(model: Any, b: Any) -> Tensor:
    loss = classify(model, b)
    return loss + 2.0 * sum((kept.mean() - 0.7**i) ** 2 for i, kept in enumerate(model.kept, 1)) / len(
        model.kept
    )


def tokens_dropped_by_draws() -> Job:
    return job_of(Pruned, _with_ratio, IMAGES)


class Points(nn.Module):
    """Masks from queries, compared at points that are most uncertain (Mask2Former, PointRend)."""

    def __init__(self) -> None:
        super().__init__()
        self.pixel = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 9, 1)
        )
        self.queries = nn.Parameter(torch.randn(4, 9))
        self.cross = nn.MultiheadAttention(9, 3, batch_first=True)

    def forward(self, image: Tensor) -> Tensor:
        pixels = self.pixel(image)
        q = self.queries.expand(len(image), -1, -1)
        for _ in range(2):
            masks = torch.einsum("bqc,bchw->bqhw", q, pixels)
            hidden = (masks.sigmoid().flatten(2) < 0.5).detach()
            hidden[hidden.all(-1)] = False
            flat = pixels.flatten(2).transpose(1, 2)
            q = q + self.cross(q, flat, flat, attn_mask=hidden.repeat_interleave(3, 0))[0]
        return torch.einsum("bqc,bchw->bqhw", q, pixels)


def _at_points(model: Any, b: Any) -> Tensor:
    masks = model(b["image"]).flatten(0, 1).unsqueeze(1)
    target = b["masks"].flatten(0, 1).unsqueeze(1).to(masks)
    with torch.no_grad():
        drawn = torch.rand(len(masks), 30, 2, dtype=masks.dtype)
        values = F.grid_sample(masks, 2 * drawn.unsqueeze(2) - 1, align_corners=False).squeeze(3).squeeze(1)
        index = (-values.abs()).topk(9, dim=1)[1]
        chosen = drawn.gather(1, index.unsqueeze(-1).expand(-1, -1, 2))
        points = torch.cat([chosen, torch.rand(len(masks), 3, 2, dtype=masks.dtype)], 1).unsqueeze(2) * 2 - 1
        labels = F.grid_sample(target, points, mode="nearest", align_corners=False).flatten(1)
    logits = F.grid_sample(masks, points, align_corners=False).flatten(1)
    probability = logits.sigmoid()
    dice = 1 - (2 * (probability * labels).sum(-1) + 1) / (probability.sum(-1) + labels.sum(-1) + 1)
    return F.binary_cross_entropy_with_logits(logits, labels) + dice.mean()


def masks_at_uncertain_points() -> Job:
    return job_of(
        Points,
        _at_points,
        {"image": IMAGES["image"], "masks": torch.arange(SAMPLES * 4 * 64).view(SAMPLES, 4, 8, 8) % 7 > 3},
    )

"""Detection and segmentation: suppression, matching and sampling of boxes in the loss, by loops over images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, uniform

IMAGES, CORNERS, SIZES = uniform(311, 3, 8, 8), uniform(312, 2, 2) * 4, uniform(313, 2, 2) * 3 + 1
SCENES = [
    (
        IMAGES[i],
        {
            "boxes": torch.cat([CORNERS[i], CORNERS[i] + SIZES[i]], -1)[: 1 + i % 2],
            "labels": torch.tensor([i % 3, (i + 1) % 3])[: 1 + i % 2],
        },
    )
    for i in range(24)
]


def _collate(samples: list[Any]) -> Any:
    images, targets = tuple(zip(*samples, strict=True))
    return torch.stack(images), list(targets)


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    area = lambda x: (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])  # noqa: E731
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (area(a)[:, None] + area(b) - inter + 1e-9)


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    order = scores.argsort(descending=True)
    keep: list[int] = []
    while order.numel() > 0:
        i = order[0].item()
        keep.append(int(i))
        if order.numel() == 1:
            break
        iou = box_iou(boxes[i : i + 1], boxes[order[1:]])[0]
        order = order[1:][iou <= threshold]
    return torch.as_tensor(keep, dtype=torch.long)


class FasterRCNN(nn.Module):
    """Anchors; a proposal network; suppression; proposals that are matched and pooled by slices; a head on them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 7, 3, padding=1), nn.ReLU()
        )
        self.cls_logits, self.bbox_pred = nn.Conv2d(7, 1, 1), nn.Conv2d(7, 4, 1)
        self.fc, self.cls_score = nn.Linear(7, 9), nn.Linear(9, 4)

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        features = self.backbone(images)
        n, _, h, w = features.shape
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        centers = torch.stack([xs, ys], -1).reshape(-1, 2).to(features) + 0.5
        anchors = torch.cat([centers - 1.5, centers + 1.5], -1)
        objectness = self.cls_logits(features).permute(0, 2, 3, 1).reshape(n, -1)
        deltas = self.bbox_pred(features).permute(0, 2, 3, 1).reshape(n, -1, 4)
        obj_losses, box_losses, cls_losses = [], [], []
        for i, target in enumerate(targets):
            iou = box_iou(target["boxes"].to(anchors), anchors)
            matched, index = iou.max(dim=0)
            positive = torch.where(matched >= 0.3)[0]
            negative = torch.where(matched < 0.1)[0][:11]
            sampled = torch.cat([positive, negative])
            labels = torch.zeros_like(objectness[i])
            labels[positive] = 1.0
            obj_losses.append(F.binary_cross_entropy_with_logits(objectness[i][sampled], labels[sampled]))
            goal = target["boxes"].to(anchors)[index[positive]] - anchors[positive]
            box_losses.append(
                F.smooth_l1_loss(deltas[i][positive], goal, reduction="sum") / max(1, sampled.numel())
            )
            with torch.no_grad():
                proposals = (anchors + deltas[i]).clamp(0, 8)
                keep = nms(proposals, objectness[i], 0.5)[:6]
                proposals = torch.cat([proposals[keep], target["boxes"].to(anchors)])
                best, which = box_iou(target["boxes"].to(anchors), proposals).max(0)
                classes = target["labels"][which] + 1
                classes[best < 0.5] = 0
            pooled = []
            for x1, y1, x2, y2 in proposals.round().long().tolist():
                pooled.append(
                    features[i, :, min(y1, h - 1) : max(y2, y1 + 1), min(x1, w - 1) : max(x2, x1 + 1)].amax(
                        (1, 2)
                    )
                )
            cls_losses.append(F.cross_entropy(self.cls_score(F.relu(self.fc(torch.stack(pooled)))), classes))
        return {"obj": torch.stack(obj_losses).mean(), "box": torch.stack(box_losses).mean(), "cls": torch.stack(cls_losses).mean()}  # fmt: skip


def faster_rcnn() -> Job:
    return job_of(FasterRCNN, lambda m, b: sum(m(*b).values()), SCENES, collate=_collate, batch_size=7)


class FCOS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)
        )
        self.tower = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True))
        self.cls, self.reg, self.ctr = nn.Conv2d(6, 3, 1), nn.Conv2d(6, 4, 1), nn.Conv2d(6, 1, 1)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.0 + i)) for i in range(2)])

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        outs, x = [], self.backbone(x)
        for level in range(2):
            f = self.tower(x)
            outs.append((self.cls(f), F.relu(self.reg(f) * self.scales[level]), self.ctr(f)))
            x = F.max_pool2d(x, 2)
        return outs


def _fcos(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Normalised by the number of positive places of the batch: (sum, weight)."""
    images, targets = batch
    total, positives = images.new_zeros(()), 0
    for stride, (cls, reg, ctr) in zip((1, 2), model(images), strict=True):
        h, w = cls.shape[-2:]
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        px, py = (xs.flatten().to(images) + 0.5) * stride, (ys.flatten().to(images) + 0.5) * stride
        for i, t in enumerate(targets):
            boxes = t["boxes"].to(images)
            ltrb = torch.stack([px[:, None] - boxes[:, 0], py[:, None] - boxes[:, 1], boxes[:, 2] - px[:, None], boxes[:, 3] - py[:, None]], -1)  # fmt: skip
            inside = ltrb.min(-1)[0] > 0
            areas = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))[None].repeat(len(px), 1)
            areas[~inside] = 1e8
            smallest, index = areas.min(1)
            positive = smallest < 1e8
            labels = torch.full_like(index, 3)
            labels[positive] = t["labels"][index[positive]]
            onehot = F.one_hot(labels, 4)[:, :3].to(images)
            logits = cls[i].flatten(1).t()
            p = logits.sigmoid()
            pt = p * onehot + (1 - p) * (1 - onehot)
            total = (
                total
                + (F.binary_cross_entropy_with_logits(logits, onehot, reduction="none") * (1 - pt) ** 2).sum()
            )
            goal = ltrb[torch.arange(len(px)), index][positive]
            lr, tb = goal[:, [0, 2]], goal[:, [1, 3]]
            centerness = torch.sqrt((lr.min(-1)[0] / lr.max(-1)[0]) * (tb.min(-1)[0] / tb.max(-1)[0]))
            total = (
                total
                + (
                    F.l1_loss(reg[i].flatten(1).t()[positive], goal, reduction="none").sum(-1) * centerness
                ).sum()
            )
            total = total + F.binary_cross_entropy_with_logits(
                ctr[i].flatten()[positive], centerness, reduction="sum"
            )
            positives += int(positive.sum())
    return total, float(max(positives, 1))


def fcos() -> Job:
    return job_of(FCOS, _fcos, SCENES, collate=_collate)


class SOLO(nn.Module):
    """Mask classification: kernels that the network predicts are convolved with its features, per image and instance."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.kernels = nn.Conv2d(5, 6, 3, padding=1), nn.Conv2d(6, 7, 3, stride=2, padding=1)
        self.cate, self.feature = nn.Conv2d(6, 3, 3, stride=2, padding=1), nn.Conv2d(6, 7, 1)

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        ys, xs = torch.meshgrid(
            torch.linspace(-1, 1, images.size(-2)), torch.linspace(-1, 1, images.size(-1)), indexing="ij"
        )
        coord = torch.stack([xs, ys]).expand(images.size(0), -1, -1, -1).to(images)
        f = F.relu(self.stem(torch.cat([images, coord], 1)))
        kernel, cate, feature = self.kernels(f), self.cate(f), self.feature(f)
        labels, predictions, masks = torch.full(cate.shape[:1] + cate.shape[2:], -100), [], []
        for i, t in enumerate(targets):
            for (x1, y1, x2, y2), label in zip(t["boxes"].tolist(), t["labels"], strict=True):
                mask = torch.zeros(images.shape[-2:], dtype=images.dtype)
                mask[int(y1) : int(y2) + 1, int(x1) : int(x2) + 1] = 1
                gy, gx = min(int((y1 + y2) / 4), 3), min(int((x1 + x2) / 4), 3)
                labels[i, gy, gx] = label
                predictions.append(
                    F.conv2d(feature[i : i + 1], kernel[i, :, gy, gx].view(1, -1, 1, 1)).squeeze().sigmoid()
                )
                masks.append(mask)
        p, m = torch.stack(predictions).flatten(1), torch.stack(masks).flatten(1)
        dice = 1 - (2 * (p * m).sum(1)) / ((p * p).sum(1) + (m * m).sum(1) + 0.001)
        return F.cross_entropy(cate, labels, ignore_index=-100) + 3 * dice.mean()


def solo_with_dynamic_kernels() -> Job:
    return job_of(SOLO, lambda m, b: m(*b), SCENES, collate=_collate)


PIXELS = {"x": uniform(314, 3, 8, 8), "y": integers(315, 5, 8, 8)}
PIXELS["y"][:, 0] = 255


def _weighted_pixels(model: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Classes weighted by frequency, label smoothing, ignored pixels: the mean is over weights that are counted."""
    weight = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7]).to(b["x"])
    y = b["y"]
    losses = F.cross_entropy(
        model(b["x"]), y, weight=weight, ignore_index=255, label_smoothing=0.1, reduction="sum"
    )
    return losses, weight[y[y != 255]].sum()


class PSP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        )
        self.aspp = nn.ModuleList([nn.Conv2d(6, 4, 3, padding=d, dilation=d) for d in (1, 2)])
        self.pools = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(s), nn.Conv2d(6, 3, 1)) for s in (1, 2, 3)]
        )
        self.drop, self.head = nn.Dropout2d(0.2), nn.Conv2d(6 + 8 + 9, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        x = self.stem(x)
        outs = [x] + [conv(x) for conv in self.aspp]
        outs += [F.interpolate(p(x), size=size, mode="bilinear", align_corners=False) for p in self.pools]
        return self.head(self.drop(torch.cat(outs, dim=1)))


def pyramid_with_weighted_pixels() -> Job:
    return job_of(PSP, _weighted_pixels, PIXELS)


def _ohem(model: Any, b: Any) -> Tensor:
    """Online hard examples of each image: at least some, and all that are worse than a threshold."""
    losses = F.cross_entropy(model(b["x"]), b["y"], ignore_index=255, reduction="none")
    total = 0.0
    for row in losses.flatten(1):
        row, _ = torch.sort(row, descending=True)
        if row[20] > 1.4:
            row = row[row > 1.4]
        else:
            row = row[:20]
        total = total + row.mean()
    return total / len(losses)


def hard_pixels_by_threshold() -> Job:
    return job_of(PSP, _ohem, PIXELS)


class Keypoints(nn.Module):
    """Stacked hourglass with recursion, intermediate supervision, soft-argmax, and targets drawn by numpy in the loss."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.depth, self.stem = depth, nn.Conv2d(3, 6, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1) for _ in range(depth)])
        self.low = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1) for _ in range(depth + 1)])
        self.heads, self.back = nn.ModuleList([nn.Conv2d(6, 2, 1) for _ in range(2)]), nn.Conv2d(2, 6, 1)

    def _hour_glass(self, n: int, x: Tensor) -> Tensor:
        up1 = F.relu(self.up[n - 1](x))
        low = self.low[n](F.max_pool2d(x, 2, stride=2))
        low = self._hour_glass(n - 1, low) if n > 1 else self.low[0](low)
        return up1 + F.interpolate(low, scale_factor=2)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.stem(x), []
        for head in self.heads:
            y = self._hour_glass(self.depth, x)
            maps.append(head(y))
            x = x + y + self.back(maps[-1])
        return maps


def _soft_argmax(model: Any, b: Any) -> Tensor:
    loss = 0
    target = np.zeros((len(b["x"]), 2, 8, 8), dtype=np.float64)
    for i, points in enumerate((b["points"].numpy() * 8).astype(int)):
        for j, (px, py) in enumerate(points):
            yy, xx = np.mgrid[0:8, 0:8]
            target[i, j] = np.exp(-((xx - px) ** 2 + (yy - py) ** 2) / 2)
    target = torch.from_numpy(target).to(b["x"])
    for heat in model(b["x"]):
        loss += F.mse_loss(heat, target)
        p = heat.flatten(2).softmax(-1).view_as(heat)
        grid = torch.arange(8).to(p)
        expected = torch.stack([(p.sum(2) * grid).sum(-1), (p.sum(3) * grid).sum(-1)], -1)
        loss += 0.01 * (expected / 8 - b["points"]).abs().mean()
    return loss


def hourglass_with_targets_by_numpy() -> Job:
    return job_of(Keypoints, _soft_argmax, {"x": uniform(316, 3, 8, 8), "points": uniform(317, 2, 2)})

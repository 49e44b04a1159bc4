"""Detection and segmentation: anchors matched by overlap, mined negatives, assignments, regions taken from features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform

CLASSES, CELLS, OBJECTS = 3, 4, 2
CENTRES = 0.2 + 0.6 * uniform(161, OBJECTS, 2)
SCENES = {
    "image": normal(162, 3, 8, 8), "boxes": torch.cat([CENTRES, 0.15 + 0.3 * uniform(163, OBJECTS, 2)], -1), "labels": integers(164, CLASSES, OBJECTS),
    "mask": integers(165, 2, 8, 8), "num": integers(166, OBJECTS + 1, least=1),
}  # fmt: skip


def corners(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    lt, rb = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    area = lambda x: (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])  # noqa: E731
    return inter / (area(a)[:, None] + area(b)[None] - inter)


def anchors() -> Tensor:
    y, x = torch.meshgrid(torch.arange(CELLS), torch.arange(CELLS), indexing="ij")
    centre = (torch.stack([x, y], -1).reshape(-1, 1, 2) + 0.5) / CELLS
    sizes = torch.tensor([[0.25, 0.25], [0.4, 0.3]]).expand(CELLS * CELLS, 2, 2)
    return torch.cat([centre.expand(-1, 2, -1), sizes], -1).reshape(-1, 4)


class Detector(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 9, 3, 1, 1), nn.ReLU())  # fmt: skip
        self.loc, self.conf = nn.Conv2d(9, 8, 3, padding=1), nn.Conv2d(9, 2 * classes, 3, padding=1)
        self.register_buffer("priors", anchors())
        self.priors: Tensor
        self.classes = classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = self.body(x)
        loc = self.loc(f).permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, 4)
        conf = self.conf(f).permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, self.classes)
        return loc, conf, self.priors


def encode(matched: Tensor, priors: Tensor) -> Tensor:
    centre = (matched[:, :2] - priors[:, :2]) / (0.1 * priors[:, 2:])
    return torch.cat([centre, torch.log(matched[:, 2:] / priors[:, 2:]) / 0.2], 1)


def _multibox(model: Any, b: Any) -> tuple[Tensor, Any]:
    """SSD: targets into preallocated tensors image by image, negatives by rank."""
    loc, conf, priors = model(b["image"])
    num = loc.size(0)
    loc_t, conf_t = torch.zeros_like(loc), torch.zeros(num, priors.size(0), dtype=torch.long)
    for idx in range(num):
        truths, labels = b["boxes"][idx].data, b["labels"][idx].data
        overlaps = iou(corners(truths), corners(priors.data))
        best_prior_idx, (best_overlap, best_idx) = overlaps.max(1)[1], overlaps.max(0)
        best_overlap.index_fill_(0, best_prior_idx, 2)
        for j in range(best_prior_idx.size(0)):
            best_idx[best_prior_idx[j]] = j
        c = labels[best_idx] + 1
        c[best_overlap < 0.4] = 0
        loc_t[idx], conf_t[idx] = encode(truths[best_idx], priors), c
    pos = conf_t > 0
    pos_idx = pos.unsqueeze(pos.dim()).expand_as(loc)
    loss_l = F.smooth_l1_loss(loc[pos_idx].view(-1, 4), loc_t[pos_idx].view(-1, 4), reduction="sum")
    loss_c = torch.logsumexp(conf.view(-1, model.classes), 1) - conf.view(-1, model.classes).gather(1, conf_t.view(-1, 1)).squeeze(1)  # fmt: skip
    loss_c = loss_c.view(num, -1)
    loss_c[pos] = 0
    _, loss_idx = loss_c.sort(1, descending=True)
    _, idx_rank = loss_idx.sort(1)
    num_neg = torch.clamp(3 * pos.long().sum(1, keepdim=True), max=pos.size(1) - 1)
    neg = idx_rank < num_neg.expand_as(idx_rank)
    keep = (pos + neg).gt(0)
    loss_c = F.cross_entropy(conf[keep].view(-1, model.classes), conf_t[keep], reduction="sum")
    return loss_l + loss_c, pos.sum()


def ssd_multibox() -> Job:
    return job_of(lambda: Detector(CLASSES + 1), _multibox, SCENES)


def _retina(model: Any, b: Any) -> Tensor:
    loc, conf, priors = model(b["image"])
    cls_losses, reg_losses = [], []
    for j in range(loc.shape[0]):
        boxes, labels = b["boxes"][j, : b["num"][j]], b["labels"][j, : b["num"][j]]
        p = torch.clamp(torch.sigmoid(conf[j]), 1e-4, 1.0 - 1e-4)
        overlap_max, overlap_argmax = torch.max(iou(corners(priors), corners(boxes)), dim=1)
        targets = torch.ones_like(p) * -1
        targets[torch.lt(overlap_max, 0.3), :] = 0
        positive = torch.ge(overlap_max, 0.4)
        num_positive = positive.sum()
        assigned = boxes[overlap_argmax, :]
        targets[positive, :] = 0
        targets[positive, labels[overlap_argmax][positive]] = 1
        alpha = torch.where(torch.eq(targets, 1.0), 0.25, 0.75)
        focal = alpha * torch.pow(torch.where(torch.eq(targets, 1.0), 1.0 - p, p), 2.0)
        bce = -(targets * torch.log(p) + (1.0 - targets) * torch.log(1.0 - p))
        loss = torch.where(torch.ne(targets, -1.0), focal * bce, torch.zeros_like(bce))
        cls_losses.append(loss.sum() / torch.clamp(num_positive.to(p.dtype), min=1.0))
        if positive.sum() > 0:
            diff = torch.abs(encode(assigned[positive, :], priors[positive, :]) - loc[j][positive, :])
            reg_losses.append(torch.where(torch.le(diff, 1 / 9), 4.5 * diff.pow(2), diff - 0.5 / 9).mean())
        else:
            reg_losses.append(torch.tensor(0).to(p.dtype))
    return torch.stack(cls_losses).mean(dim=0, keepdim=True) + torch.stack(reg_losses).mean(
        dim=0, keepdim=True
    )


def retina_focal() -> Job:
    return job_of(lambda: Detector(CLASSES), _retina, SCENES)


def sigmoid_focal(inputs: Tensor, targets: Tensor) -> Tensor:
    p = torch.sigmoid(inputs)
    ce = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (0.25 * targets + 0.75 * (1 - targets)) * ce * ((1 - p_t) ** 2)


class YOLO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1), nn.BatchNorm2d(7), nn.LeakyReLU(0.1), nn.Conv2d(7, 2 * (5 + CLASSES), 3, 1, 1))  # fmt: skip
        self.anchors = [(0.25, 0.25), (0.4, 0.3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(x.size(0), 2, 5 + CLASSES, CELLS, CELLS).permute(0, 1, 3, 4, 2).contiguous()


def _yolo(model: Any, b: Any) -> Tensor:
    """Targets of all objects in a list of rows, written into grids with `.long()` indices."""
    y = model(b["image"])
    targets = torch.cat([torch.cat([torch.full((OBJECTS, 1), float(i)).to(y), b["labels"][i, :, None].to(y), b["boxes"][i]], 1) for i in range(y.size(0))])  # fmt: skip
    obj_mask, tcls = torch.zeros(y.shape[:4], dtype=torch.bool), torch.zeros_like(y[..., 5:])
    box = torch.zeros_like(y[..., :4])
    gxy, gwh = targets[:, 2:4] * CELLS, targets[:, 4:6]
    ratio = torch.stack([torch.min(gwh[:, 0], torch.tensor(w)) * torch.min(gwh[:, 1], torch.tensor(h)) / (w * h) for w, h in model.anchors])  # fmt: skip
    best = ratio.max(0)[1]
    n, labels = targets[:, 0].long(), targets[:, 1].long()
    gi, gj = gxy.long().t().clamp(0, CELLS - 1)
    obj_mask[n, best, gj, gi] = True
    box[n, best, gj, gi, :2] = gxy - gxy.floor()
    box[n, best, gj, gi, 2:] = torch.log(gwh / torch.tensor(model.anchors, dtype=gwh.dtype)[best] + 1e-16)
    tcls[n, best, gj, gi, labels] = 1
    xy = F.mse_loss(torch.sigmoid(y[..., :2])[obj_mask], box[..., :2][obj_mask])
    wh = F.mse_loss(y[..., 2:4][obj_mask], box[..., 2:][obj_mask])
    conf = F.binary_cross_entropy_with_logits(y[..., 4], obj_mask.to(y.dtype))
    return xy + wh + conf + F.binary_cross_entropy_with_logits(y[..., 5:][obj_mask], tcls[obj_mask])


def yolo() -> Job:
    return job_of(YOLO, _yolo, SCENES)


class DETR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.queries = nn.Conv2d(3, 8, 2, 2), nn.Parameter(torch.rand(4, 8))
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
        self.cls, self.box = nn.Linear(8, CLASSES + 1), nn.Linear(8, 4)
        self.row, self.col = nn.Parameter(torch.rand(5, 4)), nn.Parameter(torch.rand(5, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x)
        H, W = h.shape[-2:]  # noqa: N806
        pos = torch.cat(
            [self.col[:W].unsqueeze(0).repeat(H, 1, 1), self.row[:H].unsqueeze(1).repeat(1, W, 1)], -1
        )
        pos = pos.flatten(0, 1).unsqueeze(1)
        h = self.transformer(
            pos + h.flatten(2).permute(2, 0, 1), self.queries.unsqueeze(1).repeat(1, x.size(0), 1)
        )
        h = h.transpose(0, 1)
        return {"logits": self.cls(h), "boxes": self.box(h).sigmoid()}


def giou(a: Tensor, b: Tensor) -> Tensor:
    lt, rb = torch.min(a[:, None, :2], b[None, :, :2]), torch.max(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    area = wh[..., 0] * wh[..., 1]
    own = lambda x: (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])  # noqa: E731
    overlap = iou(a, b)
    union = (own(a)[:, None] + own(b)[None]) / (1 + overlap)
    return overlap - (area - union) / area


def _hungarian(model: Any, b: Any) -> Tensor:
    out = model(b["image"])
    bs, num_queries = out["logits"].shape[:2]
    with torch.no_grad():
        prob, boxes = out["logits"].flatten(0, 1).softmax(-1), out["boxes"].flatten(0, 1)
        ids, targets = b["labels"].flatten(), b["boxes"].flatten(0, 1)
        C = 5 * torch.cdist(boxes, targets, p=1) - prob[:, ids] - 2 * giou(corners(boxes), corners(targets))  # noqa: N806
        C = C.view(bs, num_queries, -1).cpu()  # noqa: N806
        found = [linear_sum_assignment(c[i]) for i, c in enumerate(C.split([OBJECTS] * bs, -1))]
        indices = [
            (torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in found
        ]
    batch_idx = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
    src_idx = torch.cat([src for src, _ in indices])
    classes = torch.full(out["logits"].shape[:2], CLASSES, dtype=torch.int64)
    classes[batch_idx, src_idx] = torch.cat(
        [labels[j] for labels, (_, j) in zip(b["labels"], indices, strict=True)]
    )
    weight = torch.ones(CLASSES + 1, dtype=out["logits"].dtype)
    weight[-1] = 0.1
    ce = F.cross_entropy(out["logits"].transpose(1, 2), classes, weight)
    src = out["boxes"][batch_idx, src_idx]
    target = torch.cat([boxes[j] for boxes, (_, j) in zip(b["boxes"], indices, strict=True)], dim=0)
    l1 = F.l1_loss(src, target, reduction="none").sum() / len(target)
    return ce + 5 * l1 + 2 * (1 - torch.diag(giou(corners(src), corners(target)))).sum() / len(target)


def detr_by_hungarian_matching() -> Job:
    return job_of(DETR, _hungarian, SCENES)


class RoIs(nn.Module):
    """Regions pooled by `grid_sample`, loop over images and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5 * 9, 11)
        self.cls, self.reg = nn.Linear(11, CLASSES), nn.Linear(11, 4)

    def forward(self, x: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        features, regions = torch.relu(self.body(x)), []
        for i in range(x.size(0)):
            for box in boxes[i]:
                cx, cy, w, h = box
                theta = torch.stack([torch.stack([w, torch.zeros_like(w), 2 * cx - 1]), torch.stack([torch.zeros_like(h), h, 2 * cy - 1])])  # fmt: skip
                grid = F.affine_grid(theta.unsqueeze(0), [1, 5, 3, 3], align_corners=False)
                regions.append(F.grid_sample(features[i : i + 1], grid, align_corners=False))
        h = F.relu(self.fc(torch.cat(regions).flatten(1)))
        return self.cls(h), self.reg(h)


def _regions(model: Any, b: Any) -> Tensor:
    noisy = b["boxes"] + 0.03 * torch.randn_like(b["boxes"])
    cls, reg = model(b["image"], noisy.clamp(0.05, 0.95))
    wanted = (b["boxes"] - noisy).flatten(0, 1) * 10
    return F.cross_entropy(cls, b["labels"].flatten()) + F.smooth_l1_loss(reg, wanted, beta=1 / 9)


def roi_pooling_by_grid_sample() -> Job:
    return job_of(RoIs, _regions, SCENES)


class CenterNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1), nn.ReLU())
        self.hm, self.wh = nn.Conv2d(7, CLASSES, 1), nn.Conv2d(7, 2, 1)
        self.hm.bias.data.fill_(-2.19)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.body(x)
        return self.hm(f), self.wh(f)


def _heatmaps(model: Any, b: Any) -> Tensor:
    """Gaussians drawn by numpy, a focal loss that asks how many positives there are."""
    hm, wh = model(b["image"])
    hm = torch.clamp(hm.sigmoid(), min=1e-4, max=1 - 1e-4)
    target = np.zeros(tuple(hm.shape))
    boxes, labels = b["boxes"].detach().cpu().numpy(), b["labels"].numpy()
    index = np.zeros(boxes.shape[:2], dtype=np.int64)
    ys, xs = np.ogrid[:CELLS, :CELLS]
    for i in range(len(boxes)):
        for j, (cx, cy, _, _) in enumerate(boxes[i]):
            x, y = int(cx * CELLS), int(cy * CELLS)
            index[i, j] = y * CELLS + x
            bump = np.exp(-((xs - x) ** 2 + (ys - y) ** 2) / 0.7)
            np.maximum(target[i, labels[i, j]], bump, out=target[i, labels[i, j]])
    gt = torch.from_numpy(target).to(hm.dtype)
    pos, neg = gt.eq(1).to(hm.dtype), gt.lt(1).to(hm.dtype)
    num_pos = pos.sum()
    pos_loss = (torch.log(hm) * torch.pow(1 - hm, 2) * pos).sum()
    neg_loss = (torch.log(1 - hm) * torch.pow(hm, 2) * torch.pow(1 - gt, 4) * neg).sum()
    loss = -neg_loss if num_pos == 0 else -(pos_loss + neg_loss) / num_pos
    feat = wh.permute(0, 2, 3, 1).reshape(wh.size(0), -1, 2)
    found = feat.gather(1, torch.from_numpy(index).unsqueeze(2).expand(-1, -1, 2))
    return loss + 0.1 * F.l1_loss(found, b["boxes"][..., 2:])


def center_net() -> Job:
    return job_of(CenterNet, _heatmaps, SCENES)


def _lovasz_and_mining(model: Any, b: Any) -> Tensor:
    """Lovász's hinge image by image, and the hardest pixels' cross-entropy."""
    logits = model(b["image"]).squeeze(1)
    losses = []
    for logit, label in zip(logits, b["mask"], strict=True):
        logit, label = logit.reshape(-1), label.reshape(-1).to(logit.dtype)
        errors, perm = torch.sort(1.0 - logit * (2.0 * label - 1.0), dim=0, descending=True)
        sorted_ = label[perm.data]
        inter, union = sorted_.sum() - sorted_.cumsum(0), sorted_.sum() + (1 - sorted_).cumsum(0)
        jaccard = 1.0 - inter / union
        jaccard[1:] = jaccard[1:] - jaccard[:-1].clone()
        losses.append(torch.dot(F.relu(errors), jaccard.detach()))
    pixel = F.binary_cross_entropy_with_logits(logits, b["mask"].to(logits.dtype), reduction="none").view(-1)
    hard = pixel[pixel > -math.log(0.6)]
    least = pixel.numel() // 16
    if hard.numel() < least:
        hard, _ = pixel.topk(least)
    return torch.stack(losses).mean() + hard.mean()


def lovasz_and_hard_pixels() -> Job:
    model = lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 1, 1))  # noqa: E731  # fmt: skip
    return job_of(model, _lovasz_and_mining, SCENES)


def _focal_sum(model: Any, b: Any) -> tuple[Tensor, Tensor]:
    logits = model(b["image"]).squeeze(1)
    return sigmoid_focal(logits, b["mask"].to(logits.dtype)).sum(), b["mask"].sum().clamp(min=1)


def focal_of_pixels() -> Job:
    model = lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.GroupNorm(1, 7), nn.Mish(), nn.Conv2d(7, 1, 1))  # noqa: E731  # fmt: skip
    return job_of(model, _focal_sum, SCENES)

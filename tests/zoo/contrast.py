"""Self-supervised and metric learning: queues, moving teachers, assignments by transport, mined triplets, margins."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, sgd

VIEWS = {"one": normal(151, 7), "two": normal(152, 7), "label": integers(153, 3)}


def encoder(outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(inplace=True), nn.Linear(13, 9), nn.ReLU(inplace=True), nn.Linear(9, outputs))  # fmt: skip


def _nt_xent(model: Any, b: Any) -> Tensor:
    features = torch.cat([model(b["one"]), model(b["two"])], dim=0)
    labels = torch.cat([torch.arange(b["one"].size(0)) for _ in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).to(features.dtype)
    features = F.normalize(features, dim=1)
    similarity = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1) / 0.5
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def sim_clr() -> Job:
    return job_of(encoder, _nt_xent, VIEWS)


class MoCo(nn.Module):
    """A queue of keys in a buffer and a pointer, both written in the forward; the key encoder stands still."""

    def __init__(self, size: int = 48, moving: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.size, self.moving = encoder(), encoder(), size, moving
        for param_q, param_k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(5, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self.queue: Tensor
        self.queue_ptr: Tensor

    @torch.no_grad()
    def _momentum_update(self) -> None:
        for param_q, param_k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            param_k.data = param_k.data * 0.9 + param_q.data * 0.1

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.size

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        q = F.normalize(self.q(one), dim=1)
        with torch.no_grad():
            if self.moving:
                self._momentum_update()
            k = F.normalize(self.k(two), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.3
        self._dequeue_and_enqueue(k)
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def _two(model: Any, b: Any) -> Tensor:
    return model(b["one"], b["two"])


def moco_queue() -> Job:
    return job_of(MoCo, _two, VIEWS, optimizer=sgd)


def moco_with_moving_keys() -> Job:
    return job_of(lambda: MoCo(moving=True), _two, VIEWS, optimizer=sgd)


class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = encoder(), nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True), nn.Linear(9, 5))  # fmt: skip
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    t.mul_(0.9).add_(p.detach(), alpha=0.1)
        with torch.no_grad():
            t1, t2 = self.target(one).detach(), self.target(two).detach()
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        return (4 - 2 * F.cosine_similarity(p1, t2, dim=-1) - 2 * F.cosine_similarity(p2, t1, dim=-1)).mean()


def byol() -> Job:
    return job_of(BYOL, _two, VIEWS)


class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.h = (
            encoder(),
            nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 5)),
        )

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        z1, z2 = self.f(one), self.f(two)
        D = lambda p, z: -F.cosine_similarity(p, z.detach(), dim=-1).mean()  # noqa: E731, N806
        return D(self.h(z1), z2) / 2 + D(self.h(z2), z1) / 2


def sim_siam() -> Job:
    return job_of(SimSiam, _two, VIEWS)


class SwAV(nn.Module):
    """Prototypes, normalised in every forward, and codes by Sinkhorn's iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.prototypes = encoder(), nn.Linear(5, 6, bias=False)

    @torch.no_grad()
    def sinkhorn(self, out: Tensor) -> Tensor:
        q = torch.exp(out / 0.2).t()
        B, K = q.shape[1], q.shape[0]  # noqa: N806
        q /= torch.sum(q)
        for _ in range(3):
            q /= torch.sum(q, dim=1, keepdim=True)
            q /= K
            q /= torch.sum(q, dim=0, keepdim=True)
            q /= B
        q *= B
        return q.t()

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        z = F.normalize(self.net(torch.cat([one, two])), dim=1)
        scores = z @ F.normalize(self.prototypes.weight, dim=1).t()
        s1, s2 = scores.chunk(2)
        q1, q2 = self.sinkhorn(s1.detach()), self.sinkhorn(s2.detach())
        return -0.5 * torch.mean(
            (q1 * F.log_softmax(s2 / 0.3, 1)).sum(1) + (q2 * F.log_softmax(s1 / 0.3, 1)).sum(1)
        )


def swav() -> Job:
    return job_of(SwAV, _two, VIEWS)


def off_diagonal(x: Tensor) -> Tensor:
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def _barlow(model: Any, b: Any) -> Tensor:
    z1, z2 = model(b["one"]), model(b["two"])
    c = F.batch_norm(z1, None, None, training=True).T @ F.batch_norm(z2, None, None, training=True)
    c.div_(z1.size(0))
    on = torch.diagonal(c).add_(-1).pow_(2).sum()
    return on + 0.05 * off_diagonal(c).pow_(2).sum()


def barlow_twins() -> Job:
    return job_of(encoder, _barlow, VIEWS)


def _vicreg(model: Any, b: Any) -> Tensor:
    x, y = model(b["one"]), model(b["two"])
    repr_loss = F.mse_loss(x, y)
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    std = torch.mean(F.relu(1 - torch.sqrt(x.var(dim=0) + 1e-4))) + torch.mean(F.relu(1 - torch.sqrt(y.var(dim=0) + 1e-4)))  # fmt: skip
    cov = sum(off_diagonal((v.T @ v) / (v.size(0) - 1)).pow_(2).sum().div(5) for v in (x, y))
    return 25 * repr_loss + 12.5 * std + cov


def vic_reg() -> Job:
    return job_of(encoder, _vicreg, VIEWS)


class DINO(nn.Module):
    """A centre that moves with the teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder(6)
        self.teacher = copy.deepcopy(self.student)
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, 6))
        self.center: Tensor

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        student = (self.student(torch.cat([one, two])) / 0.1).chunk(2)
        raw = self.teacher(torch.cat([one, two]))
        teacher = F.softmax((raw - self.center) / 0.05, dim=-1).detach().chunk(2)
        total, n = 0.0, 0
        for iq, q in enumerate(teacher):
            for v in range(len(student)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(student[v], dim=-1), dim=-1).mean()
                n += 1
        with torch.no_grad():
            self.center = self.center * 0.9 + torch.sum(raw, dim=0, keepdim=True) / len(raw) * 0.1
        return total / n


def dino() -> Job:
    return job_of(DINO, _two, VIEWS)


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = encoder(), nn.Parameter(torch.FloatTensor(3, 5))
        nn.init.xavier_uniform_(self.weight)
        self.cos_m, self.sin_m = math.cos(0.5), math.sin(0.5)
        self.th, self.mm = math.cos(math.pi - 0.5), math.sin(math.pi - 0.5) * 0.5

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.net(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(1e-9, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > self.th, phi, cosine - self.mm)
        one_hot = torch.zeros(cosine.size(), dtype=x.dtype)
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        return ((one_hot * phi) + ((1.0 - one_hot) * cosine)) * 8.0


def arc_face() -> Job:
    return job_of(ArcFace, lambda m, b: F.cross_entropy(m(b["one"], b["label"]), b["label"]), VIEWS)


class CenterLoss(nn.Module):
    """Centres in a buffer, moved towards their samples by a loop over the batch's labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = encoder(), nn.Linear(5, 3)
        self.register_buffer("centers", torch.randn(3, 5))
        self.centers: Tensor

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        z = self.net(x)
        loss = F.cross_entropy(self.head(z), label) + 0.05 * (z - self.centers[label]).pow(2).sum(1).mean()
        with torch.no_grad():
            for c in label.unique():
                mine = z[label == c]
                delta = (self.centers[c] - mine).sum(0) / (1 + len(mine))
                self.centers[c] -= 0.5 * delta
        return loss


def center_loss() -> Job:
    return job_of(CenterLoss, lambda m, b: m(b["one"], b["label"]), VIEWS)


def _batch_hard(model: Any, b: Any) -> Tensor:
    z, labels = model(b["one"]), b["label"]
    dist = torch.pow(z, 2).sum(dim=1, keepdim=True)
    dist = dist + dist.t()
    dist = dist.addmm(z, z.t(), beta=1, alpha=-2).clamp(min=1e-12).sqrt()
    mask, dist_ap, dist_an = labels.expand(len(z), len(z)).eq(labels.expand(len(z), len(z)).t()), [], []
    for i in range(z.size(0)):
        dist_ap.append(dist[i][mask[i]].max().unsqueeze(0))
        other = dist[i][mask[i] == 0]
        dist_an.append(other.min().unsqueeze(0) if len(other) else dist[i].max().detach().unsqueeze(0) + 1)
    ap, an = torch.cat(dist_ap), torch.cat(dist_an)
    return nn.MarginRankingLoss(margin=0.3)(an, ap, torch.ones_like(an))


def batch_hard_triplets() -> Job:
    return job_of(encoder, _batch_hard, VIEWS)


def _semihard(model: Any, b: Any) -> Tensor:
    """All triplets as numpy finds them, those kept whose loss is above zero."""
    z, labels = F.normalize(model(b["one"])), b["label"].cpu().data.numpy()
    triplets = []
    for label in set(labels):
        mine = np.where(labels == label)[0]
        others = np.where(labels != label)[0]
        triplets += [[a, p, n] for a in mine for p in mine if p > a for n in others]
    if len(triplets) == 0:
        return z.sum() * 0.0
    index = torch.LongTensor(np.array(triplets))
    ap = (z[index[:, 0]] - z[index[:, 1]]).pow(2).sum(1)
    an = (z[index[:, 0]] - z[index[:, 2]]).pow(2).sum(1)
    losses = F.relu(ap - an + 0.5)
    active = losses[losses > 0]
    return active.mean() if active.numel() else losses.sum() * 0


def triplets_by_numpy() -> Job:
    return job_of(encoder, _semihard, VIEWS)


def _supcon(model: Any, b: Any) -> Tensor:
    z = F.normalize(torch.stack([model(b["one"]), model(b["two"])], 1), dim=2)
    labels = b["label"].contiguous().view(-1, 1)
    mask = torch.eq(labels, labels.T).to(z.dtype)
    contrast = torch.cat(torch.unbind(z, dim=1), dim=0)
    logits = torch.div(torch.matmul(contrast, contrast.T), 0.5)
    logits = logits - torch.max(logits, dim=1, keepdim=True)[0].detach()
    mask = mask.repeat(2, 2)
    others = torch.scatter(torch.ones_like(mask), 1, torch.arange(len(mask)).view(-1, 1), 0)
    mask = mask * others
    log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    pairs = mask.sum(1)
    pairs = torch.where(pairs < 1e-6, 1, pairs)
    return -((mask * log_prob).sum(1) / pairs).mean()


def supervised_contrast() -> Job:
    return job_of(encoder, _supcon, VIEWS)


class MAE(nn.Module):
    """Patches shuffled by noise, the kept ones gathered, mask tokens put between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Linear(3, 8), nn.Parameter(0.1 * torch.randn(1, 6, 8), requires_grad=False)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.mask_token, self.decode = nn.Parameter(torch.zeros(1, 1, 8)), nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 3))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.pos
        N, L, D = h.shape  # noqa: N806
        keep = int(L * 0.5)
        noise = torch.rand(N, L)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        h = self.block(torch.gather(h, dim=1, index=shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, D)))
        mask = torch.ones([N, L], dtype=x.dtype)
        mask[:, :keep] = 0
        mask = torch.gather(mask, dim=1, index=restore)
        h = torch.cat([h, self.mask_token.repeat(N, L - keep, 1)], dim=1)
        h = torch.gather(h, dim=1, index=restore.unsqueeze(-1).repeat(1, 1, D)) + self.pos
        loss = ((self.decode(h) - x) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum()


def masked_autoencoder() -> Job:
    return job_of(MAE, lambda m, b: m(b["x"]), {"x": normal(154, 6, 3)})

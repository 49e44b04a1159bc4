"""Point clouds and scenes: nearest neighbours, farthest points one by one, voxels, rays, sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform

POINTS = {"x": normal(171, 11, 3), "y": integers(172, 4), "part": integers(173, 3, 11)}
RAYS = {"o": normal(174, 3), "d": F.normalize(normal(175, 3), dim=-1), "rgb": uniform(176, 3)}


def _classes(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


class TNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.conv, self.bn = k, nn.Conv1d(k, 7, 1), nn.BatchNorm1d(7)
        self.fc = nn.Linear(7, k * k)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        h = torch.max(F.relu(self.bn(self.conv(x))), 2, keepdim=True)[0].view(-1, 7)
        iden = torch.eye(self.k, dtype=x.dtype).view(1, self.k * self.k).repeat(b, 1)
        return (self.fc(h) + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stn, self.fstn, self.conv1 = TNet(3), TNet(7), nn.Conv1d(3, 7, 1)
        self.conv2, self.bn, self.fc = nn.Conv1d(7, 9, 1), nn.BatchNorm1d(9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(2, 1)
        x = torch.bmm(x.transpose(2, 1), self.stn(x)).transpose(2, 1)
        x = F.relu(self.conv1(x))
        trans = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = torch.max(self.bn(self.conv2(x)), 2)[0]
        return F.log_softmax(self.fc(x), dim=1), trans


def _point_net(model: Any, b: Any) -> Tensor:
    y, trans = model(b["x"])
    identity = torch.eye(trans.size(1), dtype=trans.dtype)[None, :, :]
    reg = torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - identity, dim=(1, 2)))
    return F.nll_loss(y, b["y"]) + 0.001 * reg


def point_net() -> Job:
    return job_of(PointNet, _point_net, POINTS)


def farthest_points(xyz: Tensor, number: int) -> Tensor:
    B, N, _ = xyz.shape  # noqa: N806
    centroids = torch.zeros(B, number, dtype=torch.long)
    distance = torch.ones(B, N, dtype=xyz.dtype) * 1e10
    farthest = torch.randint(0, N, (B,), dtype=torch.long)
    rows = torch.arange(B, dtype=torch.long)
    for i in range(number):
        centroids[:, i] = farthest
        centroid = xyz[rows, farthest, :].view(B, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        mask = dist < distance
        distance[mask] = dist[mask]
        farthest = torch.max(distance, -1)[1]
    return centroids


def index_points(points: Tensor, idx: Tensor) -> Tensor:
    rows = torch.arange(points.shape[0]).view(-1, *([1] * (idx.dim() - 1))).expand_as(idx)
    return points[rows, idx, :]


class SetAbstraction(nn.Module):
    """Balls around farthest points; too few neighbours are filled with the first."""

    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.number, self.conv, self.bn = number, nn.Conv2d(inputs + 3, outputs, 1), nn.BatchNorm2d(outputs)

    def forward(self, xyz: Tensor, points: Tensor | None) -> tuple[Tensor, Tensor]:
        B, N, _ = xyz.shape  # noqa: N806
        new = index_points(xyz, farthest_points(xyz, self.number))
        sqr = torch.cdist(new, xyz) ** 2
        group = torch.arange(N, dtype=torch.long).view(1, 1, N).repeat([B, self.number, 1])
        group[sqr > 1.5**2] = N
        group = group.sort(dim=-1)[0][:, :, :4]
        first = group[:, :, 0].view(B, self.number, 1).repeat([1, 1, 4])
        mask = group == N
        group[mask] = first[mask]
        grouped = index_points(xyz, group) - new.view(B, self.number, 1, 3)
        if points is not None:
            grouped = torch.cat([grouped, index_points(points, group)], dim=-1)
        return new, torch.max(F.relu(self.bn(self.conv(grouped.permute(0, 3, 2, 1)))), 2)[0].permute(0, 2, 1)


class PointNet2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = SetAbstraction(6, 0, 7), SetAbstraction(3, 7, 9), nn.Linear(9, 4)

    def forward(self, xyz: Tensor) -> Tensor:
        xyz, points = self.one(xyz, None)
        return self.fc(self.two(xyz, points)[1].max(1)[0])


def point_net_with_farthest_points() -> Job:
    return job_of(PointNet2, _classes, POINTS)


class PointTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 8)
        self.qs, self.ks, self.vs = (
            nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)]) for _ in range(3)
        )
        self.delta = nn.ModuleList(
            [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)]
        )
        self.gamma, self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), nn.Linear(8, 3)

    def forward(self, xyz: Tensor) -> Tensor:
        dists = torch.sum((xyz[:, :, None] - xyz[:, None]) ** 2, dim=-1)
        knn = dists.argsort()[:, :, :4]
        near, x = index_points(xyz, knn), self.fc(xyz)
        for q, k, v, delta, gamma in zip(self.qs, self.ks, self.vs, self.delta, self.gamma, strict=True):
            pos = delta(xyz[:, :, None] - near)
            attn = F.softmax(gamma(q(x)[:, :, None] - index_points(k(x), knn) + pos) / 8**0.5, dim=-2)
            x = torch.einsum("bmnf,bmnf->bmf", attn, index_points(v(x), knn) + pos) + x
        return self.head(x)


def point_transformer() -> Job:
    return job_of(
        PointTransformer, lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["part"]), POINTS
    )


class Pillars(nn.Module):
    """Points scattered into the cells of a grid, cells found by `unique`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 7, bias=False), nn.LayerNorm(7)
        self.conv, self.head = nn.Conv2d(7, 9, 3, padding=1), nn.Linear(9, 4)

    def forward(self, points: Tensor) -> Tensor:
        canvases = []
        for cloud in points:
            cell = ((cloud[:, :2].clamp(-1.99, 1.99) + 2) / 1.0).long()
            where = cell[:, 0] * 4 + cell[:, 1]
            pillars, inverse = torch.unique(where, return_inverse=True)
            total = torch.zeros(len(pillars), 3, dtype=cloud.dtype).index_add(0, inverse, cloud)
            mean = total / torch.bincount(inverse).unsqueeze(1)
            h = F.relu(self.norm(self.linear(torch.cat([cloud, (cloud - mean[inverse])[:, :2]], 1))))
            top = torch.zeros(len(pillars), 7, dtype=h.dtype)
            top = top.scatter_reduce(0, inverse[:, None].expand_as(h), h, "amax", include_self=False)
            canvas = torch.zeros(16, 7, dtype=h.dtype)
            canvas[pillars] = top
            canvases.append(canvas.t().view(7, 4, 4))
        return self.head(F.relu(self.conv(torch.stack(canvases))).mean((2, 3)))


def pillars() -> Job:
    return job_of(Pillars, _classes, POINTS)


class FoldingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.code = nn.Conv1d(3, 9, 1), nn.Linear(9, 5)
        self.fold1, self.fold2 = nn.Conv1d(7, 9, 1), nn.Conv1d(9, 3, 1)
        xx, yy = torch.meshgrid(torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 3), indexing="ij")
        self.grid = nn.Parameter(torch.stack([xx, yy]).view(1, 2, 9), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.code(F.relu(self.enc(x.transpose(1, 2))).max(2)[0])
        both = torch.cat([z.unsqueeze(2).repeat(1, 1, 9), self.grid.expand(x.size(0), -1, -1)], 1)
        return self.fold2(F.relu(self.fold1(both))).transpose(1, 2)


def _chamfer(model: Any, b: Any) -> Tensor:
    x, y = b["x"], model(b["x"])
    d = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    one, _ = torch.min(d, 1)
    other, _ = torch.min(d, 2)
    return one.mean() + other.mean()


def chamfer_autoencoder() -> Job:
    return job_of(FoldingNet, _chamfer, POINTS)


class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(2))
        self.freqs: Tensor
        self.l1, self.l2 = nn.Linear(15, 13), nn.Linear(28, 13)
        self.sigma, self.rgb = (
            nn.Linear(13, 1),
            nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 3), nn.Sigmoid()),
        )

    def embed(self, x: Tensor) -> Tensor:
        out = [x]
        for freq in self.freqs:
            for fn in (torch.sin, torch.cos):
                out.append(fn(x * freq))  # noqa: PERF401
        return torch.cat(out, -1)

    def forward(self, o: Tensor, d: Tensor) -> Tensor:
        z = torch.linspace(1.0, 3.0, 6, dtype=o.dtype).expand(o.size(0), 6)
        mids = 0.5 * (z[..., 1:] + z[..., :-1])
        upper, lower = torch.cat([mids, z[..., -1:]], -1), torch.cat([z[..., :1], mids], -1)
        z = lower + (upper - lower) * torch.rand(z.shape).to(z)
        pts = o[:, None, :] + d[:, None, :] * z[..., :, None]
        e = self.embed(pts)
        h = F.relu(self.l2(torch.cat([e, F.relu(self.l1(e))], -1)))
        sigma = F.relu(self.sigma(h)).squeeze(-1)
        rgb = self.rgb(torch.cat([h, d[:, None, :].expand_as(pts)], -1))
        dists = torch.cat([z[..., 1:] - z[..., :-1], torch.Tensor([1e10]).to(z).expand(z[..., :1].shape)], -1)
        alpha = 1.0 - torch.exp(-sigma * dists)
        trans = torch.cumprod(
            torch.cat([torch.ones((alpha.shape[0], 1)).to(z), 1.0 - alpha + 1e-10], -1), -1
        )[:, :-1]
        return torch.sum((alpha * trans)[..., None] * rgb, -2)


def nerf() -> Job:
    return job_of(NeRF, lambda m, b: torch.mean((m(b["o"], b["d"]) - b["rgb"]) ** 2), RAYS)


class ISAB(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.I = nn.Parameter(torch.Tensor(1, 4, 6))
        nn.init.xavier_uniform_(self.I)
        self.a, self.b = (
            nn.MultiheadAttention(6, 2, batch_first=True),
            nn.MultiheadAttention(6, 2, batch_first=True),
        )
        self.ff = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.I.repeat(x.size(0), 1, 1), x, x, need_weights=False)[0]
        x = x + self.b(x, h, h, need_weights=False)[0]
        return x + self.ff(x)


class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.enc = nn.Linear(3, 6), nn.Sequential(ISAB(), ISAB())
        self.seed, self.pma, self.head = nn.Parameter(torch.randn(1, 1, 6)), nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.enc(self.proj(x))
        return self.head(self.pma(self.seed.repeat(x.size(0), 1, 1), x, x)[0].squeeze(1))


def set_transformer() -> Job:
    return job_of(SetTransformer, _classes, POINTS)


class SlotAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mu, self.logsigma = nn.Linear(3, 8), nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.zeros(1, 1, 8))  # fmt: skip
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gru, self.mlp = (
            nn.GRUCell(8, 8),
            nn.Sequential(nn.Linear(8, 11), nn.ReLU(inplace=True), nn.Linear(11, 8)),
        )
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(8) for _ in range(3)]), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        mu, sigma = self.mu.expand(b, 3, -1), self.logsigma.exp().expand(b, 3, -1)
        slots = mu + sigma * torch.randn(mu.shape, dtype=x.dtype)
        x = self.norms[0](self.proj(x))
        k, v = self.k(x), self.v(x)
        for _ in range(2):
            prev = slots
            dots = torch.einsum("bid,bjd->bij", self.q(self.norms[1](slots)), k) * 8**-0.5
            attn = dots.softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            slots = self.gru(
                torch.einsum("bjd,bij->bid", v, attn).reshape(-1, 8), prev.reshape(-1, 8)
            ).reshape(b, -1, 8)
            slots = slots + self.mlp(self.norms[2](slots))
        return self.head(slots.max(1)[0])


def slot_attention() -> Job:
    return job_of(SlotAttention, _classes, POINTS)


class Perceiver(nn.Module):
    """A few latents that read the points again and again, with shared weights, and Fourier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.cross = nn.Parameter(torch.randn(3, 8)), nn.MultiheadAttention(8, 2, kdim=15, vdim=15, batch_first=True)  # fmt: skip
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.1, batch_first=True, norm_first=True), nn.Linear(8, 4)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        angles = x.unsqueeze(-1) * torch.tensor([1.0, 2.0], dtype=x.dtype)
        data = torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        z = self.latents.unsqueeze(0).expand(x.size(0), -1, -1)
        for _ in range(2):
            z = z + self.cross(z, data, data)[0]
            z = self.layer(z)
        return self.head(z.mean(dim=-2))


def perceiver() -> Job:
    return job_of(Perceiver, _classes, POINTS)

"""Operators that few models have, each between two layers: h [n, 12] -> anything with n rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

Operator = Callable[[Tensor], Tensor]
WIDTH = 12


class Between(nn.Module):
    """x [n, 7] -> [n, 5]. Its construction runs the operator once, to know how much it returns."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.first, self.operator = nn.Linear(7, WIDTH), operator
        with torch.no_grad():
            size = self._flat(torch.randn(8, WIDTH) * 0.3).shape[1]
        self.last = nn.Linear(size, 5)

    def _flat(self, h: Tensor) -> Tensor:
        return self.operator(h).reshape(h.shape[0], -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._flat(self.first(x)))


def job(name: str) -> Job:
    """Three steps of eight samples with the operator of this name."""
    data = {"x": normal(901, 7), "y": integers(902, 5)}
    return job_of(
        partial(Between, OPERATORS[name]), lambda model, b: F.cross_entropy(model(b["x"]), b["y"]), data
    )


def _kernel(h: Tensor, *shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=h.dtype).view(shape)


def _windowed(h: Tensor, window: Tensor) -> Tensor:
    return torch.istft(0.7 * torch.stft(h, 16, 4, window=window, return_complex=True), 16, 4, window=window)


def _written_by_columns(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for k in range(WIDTH):
        out[:, k] = h[:, WIDTH - 1 - k] * (k + 1)
    return out


def _between(h: Tensor, least: Tensor, most: Tensor) -> Tensor:
    return (h - least) / (most - least)


def _assigned(h: Tensor) -> Tensor:
    out = h.clone()
    out[h < 0] = 0.1
    out[:, h.mean(0) > 0] *= 2
    return out


def _added_where_positive(h: Tensor) -> Tensor:
    rows, columns = (h > 0).nonzero(as_tuple=True)
    return torch.zeros(h.shape[0], dtype=h.dtype).index_add(0, rows, h[rows, columns])[:, None] * h


# fmt: off
OPERATORS: dict[str, Operator] = {
    "logcumsumexp": lambda h: torch.logcumsumexp(h, 1),
    "cummax": lambda h: torch.cummax(h, 1).values,
    "cummin both": lambda h: torch.cummin(h, 1).values + h * (torch.cummin(h, 1).indices > 3),
    "cumprod": lambda h: torch.cumprod(h, 1),
    "kthvalue": lambda h: torch.kthvalue(h, 3, 1, keepdim=True).values * h,
    "median": lambda h: h - h.median(1, keepdim=True).values,
    "mode": lambda h: h - (h.detach() * 2).round().mode(1, keepdim=True).values,
    "quantile": lambda h: h / (1 + torch.quantile(h, 0.7, 1, keepdim=True).abs()),
    "nanquantile": lambda h: h - torch.nanquantile(h, torch.tensor([0.25, 0.5], dtype=h.dtype), 1).mean(0)[:, None],
    "sort stable descending": lambda h: h.sort(dim=1, descending=True, stable=True)[0],
    "argsort gather": lambda h: h.gather(1, h.argsort(1)),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
    "topk unsorted": lambda h: h.topk(5, 1, sorted=True).values,
    "msort": lambda h: torch.msort(h.t()).t(),
    "masked_scatter": lambda h: h.masked_scatter(h > 0.2, h.flip(1).contiguous()),
    "index_reduce": lambda h: torch.zeros_like(h[:, :4]).index_reduce(1, torch.arange(12) % 4, h, "amax", include_self=False),
    "index_add": lambda h: torch.zeros_like(h[:, :4]).index_add(1, torch.arange(12) % 4, h, alpha=0.5),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([3, 1]), h[:, :2] * 2),
    "index_fill": lambda h: h.index_fill(1, torch.tensor([3, 1]), 0.3) * h,
    "index_put accumulate": lambda h: torch.zeros_like(h).index_put((torch.arange(h.shape[0])[:, None], torch.arange(12)[None] % 5), h, accumulate=True),
    "scatter_reduce prod": lambda h: torch.ones_like(h[:, :4]).scatter_reduce(1, (torch.arange(12) % 4).expand_as(h), h, "prod"),
    "scatter_add": lambda h: torch.zeros_like(h[:, :4]).scatter_add(1, (torch.arange(12) % 4).expand_as(h), h),
    "segment_reduce": lambda h: torch.segment_reduce(h.t().contiguous(), "mean", lengths=torch.tensor([3, 4, 5]), axis=0).t(),
    "block_diag": lambda h: torch.block_diag(h[:, :3].mean(0), h[:, 3:6].mean(0)).sum() + h,
    "kron": lambda h: torch.stack([torch.kron(r[:3], r[3:7]) for r in h.unbind(0)]),
    "tensordot": lambda h: torch.tensordot(h.view(-1, 3, 4), torch.linspace(-1, 1, 20, dtype=h.dtype).view(4, 5), dims=([2], [0])),
    "einsum ellipsis": lambda h: torch.einsum("...ij,...kj->...ik", h.view(-1, 3, 4), h.view(-1, 3, 4)),
    "einsum trace": lambda h: torch.einsum("bii->bi", h[:, :9].view(-1, 3, 3)),
    "outer": lambda h: torch.stack([torch.outer(r[:3], r[3:6]) for r in h]),
    "cross": lambda h: torch.linalg.cross(h[:, :3], h[:, 3:6]),
    "vander": lambda h: torch.linalg.vander(torch.tanh(h[:, :4]), N=3),
    "cov": lambda h: torch.stack([torch.cov(r.view(3, 4)) for r in h]),
    "corrcoef": lambda h: torch.corrcoef(h.t()).sum() * 0.01 + h,
    "pdist": lambda h: F.pdist(h).mean() * h,
    "cdist p1": lambda h: torch.cdist(h.view(-1, 3, 4), h.view(-1, 3, 4) + 1, p=1.0),
    "combinations": lambda h: torch.stack([torch.combinations(r[:4], 2).prod(1) for r in h]),
    "cartesian_prod": lambda h: torch.stack([torch.cartesian_prod(r[:3], r[3:5]).sum(1) for r in h]),
    "trapezoid": lambda h: torch.trapezoid(h.view(-1, 3, 4), dx=0.5),
    "cumulative_trapezoid": lambda h: torch.cumulative_trapezoid(h),
    "diff": lambda h: torch.diff(h, n=2, dim=1, prepend=h[:, :1]),
    "gradient": lambda h: torch.gradient(h, dim=1)[0],
    "rot90": lambda h: torch.rot90(h.view(-1, 3, 4), 1, (1, 2)),
    "unfold overlapping": lambda h: h.unfold(1, 4, 3),
    "as_strided": lambda h: h.contiguous().as_strided((h.shape[0], 5, 3), (12, 2, 1)),
    "tril triu": lambda h: h[:, :9].view(-1, 3, 3).tril(-1) + h[:, 3:].view(-1, 3, 3).triu(1),
    "diag_embed": lambda h: torch.diag_embed(h[:, :4], offset=1),
    "diagonal_scatter": lambda h: torch.diagonal_scatter(h[:, :9].view(-1, 3, 3), h[:, 9:], dim1=1, dim2=2),
    "slice_scatter": lambda h: torch.slice_scatter(h, h[:, :4] * 2, 1, 2, 10, 2),
    "select_scatter": lambda h: torch.select_scatter(h, h[:, 0] * 2, 1, 5),
    "repeat_interleave": lambda h: h.repeat_interleave(torch.tensor([1, 2, 0, 3] * 3), dim=1),
    "tile roll": lambda h: h.tile(1, 2).roll(3, 1),
    "hstack dstack": lambda h: torch.dstack([h, h.flip(1)]),
    "tensor_split": lambda h: sum(t.sum(1, keepdim=True) * k for k, t in enumerate(torch.tensor_split(h, (2, 7), 1))),
    "chunk uneven": lambda h: torch.cat([c * k for k, c in enumerate(h.chunk(5, 1), 1)][::-1], 1),
    "movedim": lambda h: h.view(-1, 2, 3, 2).movedim(1, 3).swapaxes(1, 2),
    "unflatten": lambda h: h.unflatten(1, (3, 4)).mT.flatten(1),
    "linalg svd": lambda h: torch.linalg.svdvals(h.view(-1, 3, 4)),
    "linalg svd vectors": lambda h: (lambda u, s, v: (u * s[:, None]) @ v)(*torch.linalg.svd(h.view(-1, 3, 4), full_matrices=False)),
    "linalg eigh": lambda h: torch.linalg.eigvalsh(h[:, :9].view(-1, 3, 3) + 3 * torch.diag(torch.arange(3.0)).to(h)),
    "linalg qr": lambda h: torch.linalg.qr(h.view(-1, 4, 3))[1],
    "linalg solve": lambda h: torch.linalg.solve(h[:, :9].view(-1, 3, 3) + 4 * torch.eye(3).to(h), h[:, 9:, None]),
    "linalg pinv": lambda h: torch.linalg.pinv(h.view(-1, 4, 3) + torch.eye(4, 3).to(h) * 2),
    "linalg cholesky": lambda h: torch.linalg.cholesky(h.view(-1, 3, 4) @ h.view(-1, 3, 4).mT + 2 * torch.eye(3).to(h)),
    "linalg inv_ex": lambda h: torch.linalg.inv_ex(h[:, :9].view(-1, 3, 3) + 4 * torch.eye(3).to(h)).inverse,
    "cholesky_solve": lambda h: torch.cholesky_solve(h[:, :3, None], torch.linalg.cholesky(h.view(-1, 3, 4) @ h.view(-1, 3, 4).mT + 2 * torch.eye(3).to(h))),
    "triangular solve": lambda h: torch.linalg.solve_triangular(h[:, :9].view(-1, 3, 3).tril(-1) + 2 * torch.eye(3).to(h), h[:, 9:, None], upper=False),
    "lu solve": lambda h: torch.linalg.lu_solve(*torch.linalg.lu_factor(h[:, :9].view(-1, 3, 3) + 4 * torch.eye(3).to(h)), h[:, 9:, None]),
    "lstsq": lambda h: torch.linalg.lstsq(h.view(-1, 4, 3), h[:, :4, None]).solution[..., 0],
    "matrix_power": lambda h: torch.linalg.matrix_power(h[:, :9].view(-1, 3, 3) * 0.3, 3),
    "matrix_norm nuclear": lambda h: torch.linalg.matrix_norm(h.view(-1, 3, 4), "nuc")[:, None] * h,
    "vector_norm inf": lambda h: torch.linalg.vector_norm(h, float("inf"), 1, keepdim=True) * h,
    "norm p3": lambda h: h / (1 + h.norm(3, 1, True)),
    "renorm": lambda h: torch.renorm(h, 2, 0, 1.0),
    "multi_dot": lambda h: torch.linalg.multi_dot([h, torch.linspace(-1, 1, 48, dtype=h.dtype).view(12, 4), torch.linspace(-1, 1, 12, dtype=h.dtype).view(4, 3)]),
    "householder": lambda h: torch.linalg.householder_product(h.view(-1, 4, 3).tril(-1), h[:, :3] * 0.1),
    "bucketize": lambda h: h * (1 + torch.bucketize(h.detach(), torch.tensor([-0.5, 0.0, 0.5], dtype=h.dtype))),
    "searchsorted": lambda h: h * torch.searchsorted(h.detach().sort(1).values.contiguous(), h.detach().contiguous()),
    "histc": lambda h: h * (1 + torch.histc(h.detach().float(), 5, -1, 1).argmax()),
    "fake bincount": lambda h: h * (1 + torch.bincount((h.detach().abs() * 3).long().flatten(), minlength=4)[0] % 7),
    "nan_to_num log": lambda h: torch.nan_to_num(h.log(), nan=0.3, neginf=-2.0),
    "xlogy": lambda h: torch.xlogy(h.abs(), h.abs() + 1),
    "special erfcx": lambda h: torch.special.erfcx(h) + torch.special.i0e(h),
    "special polygamma": lambda h: torch.polygamma(1, h.abs() + 1) + torch.lgamma(h.abs() + 1) + torch.digamma(h.abs() + 2),
    "special ndtri": lambda h: torch.special.ndtri(torch.sigmoid(h)) + torch.special.log_ndtr(h),
    "sinc logit": lambda h: torch.sinc(h) + torch.logit(h.sigmoid() * 0.9 + 0.05),
    "hypot atan2": lambda h: torch.hypot(h, h.flip(1) + 1) + torch.atan2(h, h.flip(1) + 2),
    "copysign ldexp": lambda h: torch.copysign(h, h.flip(1)) + torch.ldexp(h, torch.arange(12) % 3),
    "fmod remainder": lambda h: torch.fmod(h, 0.7) + torch.remainder(h, 0.9) + torch.frac(h),
    "heaviside sign": lambda h: h * torch.heaviside(h.detach(), torch.tensor(0.5, dtype=h.dtype)) + torch.sgn(h).detach(),
    "lerp addcmul": lambda h: torch.lerp(h, h.flip(1), 0.3) + torch.addcmul(h, h, h, value=0.2) + torch.addcdiv(h, h, h.abs() + 1, value=0.1),
    "logaddexp": lambda h: torch.logaddexp(h, h.flip(1)) + torch.logaddexp2(h, h.roll(1, 1)),
    "frexp": lambda h: torch.frexp(h).exponent * h,
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "fft2 shifted": lambda h: torch.fft.fftshift(torch.fft.fft2(h.view(-1, 3, 4))).real,
    "stft istft": lambda h: _windowed(h.repeat(1, 4), torch.hann_window(16, dtype=h.dtype)),
    "complex polar": lambda h: torch.view_as_real(torch.polar(h[:, :6].exp(), h[:, 6:]) * torch.complex(h[:, :6], h[:, 6:]).conj()),
    "where index": lambda h: torch.where(h > 0, h.sin(), h.cos() - 1),
    "clamp tensors": lambda h: torch.clamp(h, min=-h.abs().mean(1, keepdim=True), max=torch.tensor(0.4, dtype=h.dtype)),
    "maximum amax": lambda h: torch.maximum(h, h.flip(1)) + h.amax(1, keepdim=True) - h.amin((0, 1)),
    "aminmax": lambda h: _between(h, *torch.aminmax(h, dim=1, keepdim=True)),
    "std_mean": lambda h: (lambda s, m: (h - m) / (s + 1))(*torch.std_mean(h, 1, keepdim=True, correction=0)),
    "var over batch": lambda h: h / (1 + h.var(0, unbiased=False)),
    "logsumexp over all": lambda h: h - torch.logsumexp(h, (0, 1)),
    "softmax over batch": lambda h: h.softmax(0) + h.log_softmax(0),
    "all any": lambda h: h * (1 + (h > 0).any(1, keepdim=True) + (h > 0).all(1, keepdim=True)),
    "count_nonzero": lambda h: h * (h > 0).count_nonzero(1)[:, None],
    "unique consecutive": lambda h: h * (1 + torch.unique((h.detach() * 2).round()).numel()),
    "one hot einsum": lambda h: h * F.one_hot(h.argmax(1), 12),
    "bilinear interpolate": lambda h: F.interpolate(h.view(-1, 1, 3, 4), size=(5, 7), mode="bilinear", align_corners=True),
    "bicubic antialias": lambda h: F.interpolate(h.view(-1, 1, 3, 4), scale_factor=2, mode="bicubic", antialias=True),
    "pixel unshuffle": lambda h: F.pixel_unshuffle(h.view(-1, 1, 2, 6), 2),
    "channel shuffle": lambda h: F.channel_shuffle(h.view(-1, 4, 3, 1), 2),
    "reflect replicate pad": lambda h: F.pad(F.pad(h.view(-1, 1, 3, 4), (1, 2, 1, 0), "reflect"), (1, 0, 0, 2), "replicate"),
    "circular pad": lambda h: F.pad(h.view(-1, 3, 4), (2, 1), "circular"),
    "fold unfold": lambda h: F.fold(F.unfold(h.view(-1, 1, 3, 4), 2) * 0.5, (3, 4), 2),
    "max unpool": lambda h: F.max_unpool2d(*F.max_pool2d(h.view(-1, 1, 2, 6), 2, return_indices=True), (2, 2)),
    "adaptive pools": lambda h: torch.cat([F.adaptive_avg_pool1d(h[:, None], 5).flatten(1), F.adaptive_max_pool1d(h[:, None], 5).flatten(1)], 1),
    "local response": lambda h: F.local_response_norm(h.view(-1, 6, 2), 3),
    "lp pool": lambda h: F.lp_pool1d(h.abs()[:, None] + 0.1, 3.0, 3),
    "normalize cosine": lambda h: F.cosine_similarity(h[:, None], h[None], -1).sum(1, keepdim=True) * F.normalize(h),
    "glu variants": lambda h: F.glu(h) + F.hardswish(h[:, :6]) * F.mish(h[:, 6:]) + F.softshrink(h[:, :6]) + F.celu(h[:, 6:]),
    "prelu like threshold": lambda h: F.threshold(h, 0.1, -0.3) + F.hardtanh(h, -0.2, 0.4) + F.tanhshrink(h) + F.logsigmoid(h),
    "gumbel hard": lambda h: F.gumbel_softmax(h, hard=True) * h,
    "rrelu": lambda h: F.rrelu(h, training=True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 4, 3), 0.3, True),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "dropout2d": lambda h: F.dropout2d(h.view(-1, 3, 2, 2), 0.4, True),
    "fractional max pool": lambda h: F.fractional_max_pool2d(h.view(-1, 1, 3, 4), 2, output_size=(2, 2)),
    "noise normal_": lambda h: h + torch.empty_like(h).normal_(0, 0.1) + torch.empty_like(h).exponential_() * 0.1,
    "randperm in forward": lambda h: h[:, torch.randperm(12)],
    "shuffled batch": lambda h: 0.7 * h + 0.3 * h[torch.randperm(h.shape[0])],
    "rand beta mix": lambda h: h * torch.distributions.Beta(2.0, 3.0).sample() + 0.1,
    "gamma rsample": lambda h: torch.distributions.Gamma(h.abs() + 1, 1.0).rsample(),
    "dirichlet rsample": lambda h: torch.distributions.Dirichlet(h.abs() + 0.5).rsample(),
    "student rsample": lambda h: torch.distributions.StudentT(5.0, h, 0.3).rsample(),
    "relaxed bernoulli": lambda h: torch.distributions.RelaxedBernoulli(torch.tensor(0.5), logits=h).rsample(),
    "low rank normal": lambda h: torch.distributions.LowRankMultivariateNormal(h[:, :3], h[:, 3:9].view(-1, 3, 2), h[:, 9:].exp()).rsample(),
    "multinomial gather": lambda h: h.gather(1, torch.multinomial(h.softmax(1), 4)),
    "masked softmax nested lists": lambda h: h.masked_fill(torch.tensor([[k % 3 == 0 for k in range(12)]]), float("-inf")).softmax(1),
    "in place chain": lambda h: h.clone().mul_(2).add_(1).clamp_(-1, 2).relu_(),
    "in place rows": _written_by_columns,
    "out argument": lambda h: h + torch.mul(h.detach(), 2, out=torch.empty_like(h)),
    "view dtype": lambda h: h * (1 + (h.detach().to(torch.float32).view(torch.int32) & 1)),
    "bit shifts": lambda h: h * (1 + ((h.detach() * 8).to(torch.int64).bitwise_and(3) << 1)),
    "tolist loop": lambda h: h * sum(1.0 for v in h.detach().flatten().tolist() if v > 0) / h.numel(),
    "zip of rows": lambda h: torch.stack([a * b.sum() for a, b in zip(h, reversed(h.unbind()), strict=True)]),
    "nested comprehension": lambda h: torch.stack([torch.stack([h[:, i] * h[:, j] for j in range(i)]).sum(0) for i in range(1, 4)], 1),
    "map_ like vmap": lambda h: torch.vmap(lambda r: r * r.sum())(h),
    "jvp": lambda h: torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[1],
    "checkpoint lambda": lambda h: checkpoint(lambda z: z.tanh() * z, h, use_reentrant=False),
    "torch.cond": lambda h: torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z - 1, (h,)),
    "bmm baddbmm": lambda h: torch.baddbmm(h[:, :9].view(-1, 3, 3), h.view(-1, 3, 4), h.view(-1, 4, 3), beta=0.5, alpha=0.3),
    "addmv addr": lambda h: torch.addmm(h.mean(0), h, torch.linspace(-1, 1, 144, dtype=h.dtype).view(12, 12), alpha=0.5),
    "chain_matmul broadcast": lambda h: torch.matmul(h.view(-1, 1, 3, 4), torch.linspace(-1, 1, 24, dtype=h.dtype).view(2, 4, 3)),
    "prod dims": lambda h: h.view(-1, 3, 4).prod(2),
    "dist": lambda h: torch.dist(h, h.roll(1, 0)) * h,
    "nansum nanmean": lambda h: h.masked_fill(h < -0.4, float("nan")).nanmean(1, keepdim=True) + h.masked_fill(h < 0, float("nan")).nansum(1, keepdim=True),
    "logical mask mean": lambda h: (h * (h > 0)).sum(1, keepdim=True) / (h > 0).sum(1, keepdim=True).clamp(min=1),
    "boolean index assign": _assigned,
    "boolean select mean": lambda h: h[h > 0].mean() * h,
    "nonzero index_add": _added_where_positive,
    "split sizes of values": lambda h: torch.cat([c * k for k, c in enumerate(h.split([3, 4, 5], 1))], 1),
    "expand stride zero": lambda h: h[:, :1].expand(-1, 5) * h[:, :5] + h[:, 1:2].expand(h.shape[0], 5),
    "squeeze negative": lambda h: h[:, None].squeeze(-2).unsqueeze(-1),
    "flipud fliplr": lambda h: h.flipud() + h.fliplr(),
    "meshgrid": lambda h: h[:, :6].view(-1, 2, 3) * torch.stack(torch.meshgrid(torch.arange(2.0), torch.arange(3.0), indexing="ij")).sum(0).to(h),
    "pairwise distance": lambda h: F.pairwise_distance(h[:, :6], h[:, 6:], p=1.5)[:, None] * h,
    "embedding of argmax": lambda h: F.embedding(h.argmax(1), torch.linspace(-1, 1, 60, dtype=h.dtype).view(12, 5)) * h[:, :5],
    "conv transpose dilated": lambda h: F.conv_transpose1d(h.view(-1, 3, 4), _kernel(h, 3, 2, 3), stride=2, dilation=2, output_padding=1),
    "grouped conv 3d": lambda h: F.conv3d(h.view(-1, 2, 2, 3, 1), torch.linspace(-1, 1, 16, dtype=h.dtype).view(4, 1, 2, 2, 1), groups=2),
}
# fmt: on

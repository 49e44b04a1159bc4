"""Tasks of their own: optical flow, depth without labels, anomalies, tables, streaming speech, permuted words, large contrast, drawn tasks."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform


def _sampled(image: Tensor, coordinates: Tensor) -> Tensor:
    """image: [N, C, H, W]; coordinates: [N, 2, H, W] in pixels"""
    h, w = image.shape[-2:]
    x, y = coordinates.unbind(1)
    grid = torch.stack([2 * x / (w - 1) - 1, 2 * y / (h - 1) - 1], -1)
    return F.grid_sample(image, grid, align_corners=True, padding_mode="border")


def _pixels(n: int, h: int, w: int, like: Tensor) -> Tensor:
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack([x, y]).to(like).expand(n, -1, -1, -1)


class Flow(nn.Module):
    """Correlations of all pairs, looked up around where the flow points; a recurrent cell refines it a few times."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )
        self.motion = nn.Conv2d(9 + 2, width, 3, padding=1)
        self.z, self.r, self.q = (nn.Conv2d(3 * width, width, 3, padding=1) for _ in range(3))
        self.delta = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, one: Tensor, two: Tensor) -> list[Tensor]:
        n, _, h, w = one.shape
        f, g = self.features(torch.cat([one, two])).chunk(2)
        pairs = torch.einsum("ncij,nckl->nijkl", f, g) / f.shape[1] ** 0.5
        volume = pairs.reshape(n * h * w, 1, h, w)
        hidden, context = torch.tanh(f), torch.relu(f)
        start = _pixels(n, h, w, one)
        now, found = start.clone(), []
        around = torch.stack(torch.meshgrid(torch.arange(-1, 2), torch.arange(-1, 2), indexing="xy")).to(one)
        for _ in range(3):
            now = now.detach()
            where = now.permute(0, 2, 3, 1).reshape(-1, 2, 1, 1) + around
            scale = torch.tensor([w - 1, h - 1]).to(one).view(2, 1, 1)
            looked = F.grid_sample(volume, (2 * where / scale - 1).permute(0, 2, 3, 1), align_corners=True)
            looked = looked.view(n, h, w, 9).permute(0, 3, 1, 2)
            x = torch.cat([torch.relu(self.motion(torch.cat([looked, now - start], 1))), context], 1)
            hx = torch.cat([hidden, x], 1)
            z, r = torch.sigmoid(self.z(hx)), torch.sigmoid(self.r(hx))
            hidden = (1 - z) * hidden + z * torch.tanh(self.q(torch.cat([r * hidden, x], 1)))
            now = now + self.delta(hidden)
            found.append(now - start)
        return found


def _sequence(model: Any, b: dict[str, Tensor]) -> Tensor:
    found = model(b["one"], b["two"])
    valid = (b["flow"].norm(dim=1) < 2.5).to(b["flow"])
    total = b["flow"].new_zeros(())
    for number, each in enumerate(found):
        total = total + 0.8 ** (len(found) - number - 1) * (valid[:, None] * (each - b["flow"]).abs()).mean()
    return total


def optical_flow() -> Job:
    return job_of(
        Flow,
        _sequence,
        {"one": normal(801, 3, 6, 6), "two": normal(802, 3, 6, 6), "flow": normal(803, 2, 6, 6)},
    )


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ELU(), nn.Conv2d(6, 1, 3, padding=1), nn.Sigmoid()
        )
        self.pose = nn.Sequential(
            nn.Conv2d(6, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
        )

    def forward(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.depth(target), 0.5 * self.pose(torch.cat([target, source], 1))


def _photometric(model: Any, b: dict[str, Tensor]) -> Tensor:
    """Least errors over two neighbours and over not moving at all, ties broken by drawn noise; smooth by edges."""
    target, errors, still = b["now"], [], []
    disparity = None
    for name in ("before", "after"):
        disparity, shift = model(target, b[name])
        moved = _pixels(*target.shape[:1], *target.shape[2:], target) + shift[:, :, None, None] * disparity
        errors.append((_sampled(b[name], moved) - target).abs().mean(1, True))
        still.append((b[name] - target).abs().mean(1, True))
    same = torch.cat(still, 1)
    same = same + torch.randn(same.shape) * 1e-5
    best, which = torch.cat([same, *errors], 1).min(1)
    normed = disparity / (disparity.mean((2, 3), True) + 1e-7)
    steps = (normed[..., :-1] - normed[..., 1:]).abs()
    edges = torch.exp(-(target[..., :-1] - target[..., 1:]).abs().mean(1, True))
    mask = (which > 1).to(best)
    return (best * mask).sum() / (mask.sum() + 1e-7) + best.mean() * 0.1 + 1e-2 * (steps * edges).mean()


def depth_without_labels() -> Job:
    return job_of(
        Depth,
        _photometric,
        {"now": uniform(811, 3, 7, 7), "before": uniform(812, 3, 7, 7), "after": uniform(813, 3, 7, 7)},
    )


class Sphere(nn.Module):
    """The radius is a quantile that numpy takes, from the second call on; the centre is the first batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(7, 11, bias=False), nn.LeakyReLU(0.1), nn.Linear(11, 4, bias=False)
        )
        self.register_buffer("centre", torch.linspace(-1, 1, 4))
        self.register_buffer("radius", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        distance = ((self.net(x) - self.centre) ** 2).sum(1)
        loss = self.radius**2 + (distance - self.radius**2).clamp(min=0).mean() / 0.2
        if self.training:
            values = numpy.sqrt(distance.clone().data.cpu().numpy())
            self.radius.data = torch.tensor(numpy.quantile(values, 0.8), dtype=x.dtype)
        return loss


def anomalies_outside_a_sphere() -> Job:
    return job_of(Sphere, lambda m, b: m(b["x"]), {"x": normal(821, 7)})


class Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        top, _ = x.sort(-1, descending=True)
        sums = top.cumsum(-1) - 1
        places = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        support = (places * top > sums).sum(-1, keepdim=True)
        out = (x - sums.gather(-1, support - 1) / support).clamp(min=0)
        ctx.save_for_backward(support, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        support, out = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[out == 0] = 0
        mean = gradient.sum(-1, keepdim=True) / support
        return torch.where(out != 0, gradient - mean, gradient)


class Ghost(nn.Module):
    """Batch normalisation of parts of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x.chunk(max(len(x) // 2, 1), 0)])


class Tabular(nn.Module):
    """Steps of attention to columns, each seen less the more it was used; embeddings of the columns that are categories."""

    def __init__(self, columns: int = 8, width: int = 6, steps: int = 2) -> None:
        super().__init__()
        self.width, self.steps = width, steps
        self.categories = nn.ModuleList(nn.Embedding(size, 1) for size in (4, 3))
        self.start = nn.BatchNorm1d(columns)
        self.shared = nn.Linear(columns, 4 * width, bias=False)
        self.own = nn.ModuleList(nn.Sequential(Ghost(4 * width), nn.GLU()) for _ in range(steps + 1))
        self.attend = nn.ModuleList(
            nn.Sequential(nn.Linear(width, columns, bias=False), Ghost(columns)) for _ in range(steps)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        x = self.start(torch.cat([x, *(each(c[:, i]) for i, each in enumerate(self.categories))], 1))
        prior, entropy = torch.ones_like(x), x.new_zeros(())
        _, features = self.own[0](self.shared(x)).split(self.width, 1)
        out = torch.zeros_like(features)
        for step in range(self.steps):
            mask = Sparsemax.apply(prior * self.attend[step](features))
            entropy = entropy - (mask * torch.log(mask + 1e-15)).sum(1).mean()
            prior = (1.3 - mask) * prior
            decision, features = self.own[step + 1](self.shared(mask * x)).split(self.width, 1)
            out = out + F.relu(decision)
        return self.head(out), entropy / self.steps


def _tables(model: Any, b: dict[str, Tensor]) -> Tensor:
    out, entropy = model(b["x"], b["c"])
    return F.cross_entropy(out, b["y"]) + 1e-3 * entropy


def attentive_tables() -> Job:
    data = {"x": normal(831, 6), "c": integers(832, 3, 2), "y": integers(833, 3)}
    return job_of(Tabular, _tables, data)


class Streaming(nn.Module):
    """Self-attention within chunks of a drawn size, with a drawn number of chunks to the left; lengths as masks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.sub = nn.Conv1d(5, width, 3, stride=2, padding=1)
        self.attention, self.norm = (
            nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True),
            nn.LayerNorm(width),
        )
        self.conv, self.out = nn.Conv1d(width, width, 3, groups=width), nn.Linear(width, 6)

    def mask(self, size: int) -> Tensor:
        chunk = int(torch.randint(1, size, (1,)).item())
        if chunk > size // 2:
            chunk = size
        left = int(torch.randint(0, (size - 1) // chunk + 1, (1,)).item())
        allowed = torch.zeros(size, size, dtype=torch.bool)
        for i in range(size):
            allowed[i, max((i // chunk - left) * chunk, 0) : min((i // chunk + 1) * chunk, size)] = True
        return allowed

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.sub(x.transpose(1, 2))).transpose(1, 2)
        lengths = (lengths + 1) // 2
        padded = torch.arange(x.shape[1]) >= lengths[:, None]
        h = self.norm(x)
        h, _ = self.attention(
            h, h, h, key_padding_mask=padded, attn_mask=~self.mask(x.shape[1]), need_weights=False
        )
        h = torch.nan_to_num(h)
        x = x + h.masked_fill(padded[..., None], 0.0)
        x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return self.out(x).log_softmax(-1), lengths


def _aligned(model: Any, b: dict[str, Tensor]) -> Tensor:
    scores, lengths = model(b["x"], b["n"])
    return F.ctc_loss(
        scores.transpose(0, 1), b["y"], lengths, torch.full_like(lengths, b["y"].shape[1]), zero_infinity=True
    )


def streaming_speech() -> Job:
    return job_of(
        Streaming,
        _aligned,
        {"x": normal(841, 12, 5), "n": integers(842, 13, least=9), "y": integers(843, 6, 2, least=1)},
    )


class TwoStreams(nn.Module):
    """Two streams: what a place holds, and what is predicted of it from those that come before it in a drawn order."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(11, width), nn.Embedding(7, width)
        self.query = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def attended(self, query: Tensor, content: Tensor, allowed: Tensor) -> Tensor:
        scores = self.q(query) @ (self.k(content) + self.k(self.position.weight)).transpose(1, 2) / 8**0.5
        weights = scores.masked_fill(~allowed, -1e30).softmax(-1) * allowed.any(-1, keepdim=True)
        return self.norm(query + weights @ self.v(content))

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        order = torch.randperm(tokens.shape[1])
        rank = order.argsort()
        before = rank[:, None] > rank[None, :]
        content = self.embed(tokens)
        query = (self.query + self.position.weight).expand_as(content)
        for _ in range(2):
            query = self.attended(query, content, before)
            content = self.attended(content, content, before | torch.eye(len(order), dtype=torch.bool))
        return query[hidden] @ self.embed.weight.T


def permuted_words() -> Job:
    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["x"], b["m"]), b["x"][b["m"]])

    hidden = uniform(851, 7) < 0.4
    hidden[:, 0] = True
    return job_of(TwoStreams, loss, {"x": integers(852, 11, 7), "m": hidden})


def _cached(model: Any, b: dict[str, Tensor]) -> Tensor:
    """Contrast over the whole batch in parts: features without gradients, their gradients, and the parts once more."""
    parts = [b["x"][0::2], b["x"][1::2]]
    pairs = [b["z"][0::2], b["z"][1::2]]
    with torch.no_grad():
        a = torch.cat([F.normalize(model(each), dim=-1) for each in parts])
        c = torch.cat([F.normalize(model(each), dim=-1) for each in pairs])
    a, c = a.requires_grad_(True), c.requires_grad_(True)
    loss = F.cross_entropy(a @ c.T / 0.2, torch.arange(len(a)))
    loss.backward()
    again = torch.cat([F.normalize(model(each), dim=-1) for each in (*parts, *pairs)])
    surrogate = (again * torch.cat([a.grad, c.grad])).sum()
    return surrogate - surrogate.detach() + loss.detach()


def gradient_cache() -> Job:
    return job_of(
        lambda: nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 6)),
        _cached,
        {"x": normal(861, 7), "z": normal(862, 7)},
    )


class Heads(nn.Module):
    """Each batch trains a drawn task, whose head is found by name; weights of tasks are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 11), nn.SiLU())
        self.heads = nn.ModuleDict(
            {"class": nn.Linear(11, 4), "value": nn.Linear(11, 1), "order": nn.Linear(11, 4)}
        )
        self.uncertainty = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.trunk(x))


def _drawn_task(model: Any, b: dict[str, Tensor]) -> Tensor:
    task = random.choices(list(model.heads), weights=[0.5, 0.3, 0.2])[0]
    out, s = model(b["x"], task), model.uncertainty[task]
    if task == "class":
        loss = F.cross_entropy(out, b["c"])
    elif task == "value":
        loss = F.smooth_l1_loss(out.squeeze(-1), b["v"])
    else:
        levels = torch.arange(4)
        loss = F.binary_cross_entropy_with_logits(out, (b["c"][:, None] > levels).to(out))
    return torch.exp(-s) * loss + s


def drawn_tasks() -> Job:
    return job_of(Heads, _drawn_task, {"x": normal(871, 7), "c": integers(872, 4), "v": normal(873)})


class Regrown(nn.Module):
    """Sparse weights by masks; every second call the smallest go, and those with the largest gradients of the last backward come."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(outputs, inputs) * 0.4),
            nn.Parameter(torch.zeros(outputs)),
        )
        self.register_buffer("mask", (torch.rand(outputs, inputs) < 0.5).float())
        self.register_buffer("seen", torch.zeros(outputs, inputs))
        self.register_buffer("calls", torch.tensor(0))

    @torch.no_grad()
    def regrow(self) -> None:
        count = 3
        held = torch.where(self.mask > 0, self.weight.abs(), torch.inf)
        gone = held.flatten().topk(count, largest=False).indices
        free = torch.where(self.mask > 0, -torch.inf, self.seen.abs())
        come = free.flatten().topk(count).indices
        mask = self.mask.flatten().clone()
        mask[gone], mask[come] = 0.0, 1.0
        self.mask.copy_(mask.view_as(self.mask))

    def note(self, gradient: Tensor) -> None:
        self.seen.copy_(gradient.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if int(self.calls) % 2 == 0:
                self.regrow()
        masked = self.weight * self.mask
        if masked.requires_grad:
            masked.register_hook(self.note)
        return F.linear(x, masked, self.bias)


def regrown_sparse_weights() -> Job:
    return job_of(
        lambda: nn.Sequential(Regrown(7, 12), nn.ReLU(), Regrown(12, 5)),
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
        {"x": normal(881, 7), "y": integers(882, 5)},
    )

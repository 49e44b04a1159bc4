"""Graphs and sets: batches of graphs with their edges shifted, scatter by hand, pooling to trees, memories and queues, pairs within a batch."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import SAMPLES, integers, job_of, normal, sgd, uniform


class Graph(NamedTuple):
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    y: Tensor


def _graph(i: int) -> Graph:
    g = torch.Generator().manual_seed(400 + i)
    n = 3 + i % 4
    pairs = torch.randint(0, n, (2, n + 3), generator=g)
    return Graph(
        torch.randn(n, 5, generator=g), pairs, torch.randn(pairs.size(1), 3, generator=g), torch.tensor(i % 3)
    )


GRAPHS = [_graph(i) for i in range(SAMPLES)]


class Data:
    """A batch as a library has it: an object with attributes, of the graphs' nodes one after another."""

    def __init__(self, graphs: list[Graph]) -> None:
        sizes = [len(g.x) for g in graphs]
        offsets = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
        self.x, self.y = torch.cat([g.x for g in graphs]), torch.stack([g.y for g in graphs])
        self.edge_index = torch.cat([g.edge_index + o for g, o in zip(graphs, offsets, strict=True)], 1)
        self.edge_attr = torch.cat([g.edge_attr for g in graphs])
        self.batch = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes))
        self.num_graphs = len(graphs)


def _batch(graphs: list[Graph]) -> dict[str, Any]:
    return vars(Data(graphs))


def scatter(src: Tensor, index: Tensor, size: int, reduce: str = "sum") -> Tensor:
    index = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    out = src.new_zeros(size, *src.shape[1:])
    if reduce == "sum":
        return out.scatter_add_(0, index, src)
    return out.scatter_reduce_(0, index, src, reduce=reduce, include_self=False)


class PNAConv(nn.Module):
    """Several aggregators, scaled by logarithms of degrees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pre, self.post, self.bn = (
            nn.Linear(2 * width + 3, width),
            nn.Linear(9 * width, width),
            nn.BatchNorm1d(width),
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        row, col = edge_index
        m = F.relu(self.pre(torch.cat([x[row], x[col], edge_attr], -1)))
        n = x.size(0)
        mean = scatter(m, col, n, "mean")
        std = torch.sqrt(F.relu(scatter(m * m, col, n, "mean") - mean * mean) + 1e-5)
        agg = torch.cat([mean, scatter(m, col, n, "amax"), std], -1)
        deg = scatter(torch.ones_like(m[:, :1]), col, n).clamp_(min=1)
        amp = torch.log(deg + 1) / 1.2
        return x + F.relu(self.bn(self.post(torch.cat([agg, agg * amp, agg / amp], -1))))


class GraphClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.convs = nn.Linear(5, 6), nn.ModuleList([PNAConv(6), PNAConv(6)])
        self.gate, self.out = nn.Linear(6, 1), nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, data: Any) -> Tensor:
        x = self.enc(data["x"])
        for conv in self.convs:
            x = conv(x, data["edge_index"], data["edge_attr"])
        size = int(data["batch"].max()) + 1
        gate = self.gate(x)
        gate = (gate - scatter(gate, data["batch"], size, "amax")[data["batch"]]).exp()
        gate = gate / (scatter(gate, data["batch"], size)[data["batch"]] + 1e-16)
        return self.out(
            torch.cat([scatter(gate * x, data["batch"], size), scatter(x, data["batch"], size, "mean")], -1)
        )


def batches_of_graphs() -> Job:
    return job_of(GraphClassifier, lambda m, b: F.cross_entropy(m(b), b["y"]), GRAPHS, collate=_batch)


class EGNN(nn.Module):
    """Equivariant: coordinates move with messages; edges are those under a distance, found in each layer; index_add in place."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.edge, self.node = (
            nn.Sequential(nn.Linear(2 * width + 1, 9), nn.SiLU(), nn.Linear(9, width)),
            nn.Linear(2 * width, width),
        )
        self.coord = nn.Sequential(nn.Linear(width, 9), nn.SiLU(), nn.Linear(9, 1, bias=False))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        b, n, _ = x.shape
        h, x = h.reshape(b * n, -1), x.reshape(b * n, 3)
        graph = torch.arange(b).repeat_interleave(n)
        near = (
            (torch.cdist(x, x) < 1.5) & (graph[:, None] == graph[None]) & ~torch.eye(b * n, dtype=torch.bool)
        )
        row, col = near.nonzero(as_tuple=True)
        diff = x[row] - x[col]
        radial = (diff**2).sum(-1, keepdim=True)
        m = self.edge(torch.cat([h[row], h[col], radial], -1))
        x = x.index_add(0, row, diff / (radial.sqrt() + 1) * self.coord(m))
        agg = torch.zeros_like(h)
        agg.index_add_(0, row, m)
        h = h + self.node(torch.cat([h, agg], -1))
        return h.view(b, n, -1), x.view(b, n, 3)


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.out = (
            nn.Embedding(4, 6),
            nn.ModuleList([EGNN(), EGNN()]),
            nn.Linear(6, 1),
        )

    def forward(self, z: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        h, x = self.embed(z), pos
        for layer in self.layers:
            h, x = layer(h, x)
        return self.out(h).sum((1, 2)), x


def _energy(model: Any, b: Any) -> Tensor:
    energy, x = model(b["z"], b["pos"])
    return F.l1_loss(energy, b["e"]) + 0.1 * (x - x.mean(1, keepdim=True)).pow(2).mean()


def equivariant_graphs_by_distance() -> Job:
    return job_of(Molecule, _energy, {"z": integers(401, 4, 6), "pos": normal(402, 6, 3), "e": normal(403)})


class RGCN(nn.Module):
    """Relations in a dict of layers, node types in a dict of dicts of tensors; bases shared; unused types are skipped."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"user": nn.Linear(5, width), "item": nn.Linear(4, width)})
        self.bases = nn.Parameter(torch.randn(2, width, width) * 0.4)
        self.comb = nn.ParameterDict({r: nn.Parameter(torch.randn(2)) for r in ("buys", "likes", "bought")})
        self.norms = nn.ModuleDict({t: nn.LayerNorm(width) for t in ("user", "item")})

    def forward(self, nodes: dict[str, dict[str, Tensor]], edges: dict[str, Tensor]) -> dict[str, Tensor]:
        h = {kind: self.embed[kind](each["x"]) for kind, each in nodes.items()}
        relations = {
            ("user", "buys", "item"): edges["buys"],
            ("user", "likes", "item"): edges["likes"],
            ("item", "bought", "user"): edges["buys"].mT,
        }
        for _ in range(2):
            new: dict[str, list[Tensor]] = defaultdict(list)
            for (src, name, dst), adj in relations.items():
                weight = torch.einsum("b,bio->io", self.comb[name], self.bases)
                degree = adj.sum(1, keepdim=True).clamp(min=1)
                new[dst].append((adj / degree).transpose(1, 2) @ (h[src] @ weight))
            h = {k: self.norms[k](h[k] + torch.stack(v).sum(0)).relu_() for k, v in new.items()}
        return h


def _links(model: Any, b: Any) -> Tensor:
    h = model(b["nodes"], b["edges"])
    scores = torch.einsum("bud,bid->bui", h["user"], h["item"])
    return F.binary_cross_entropy_with_logits(scores, b["edges"]["buys"], pos_weight=scores.new_tensor(2.0))


def relations_in_dicts_of_dicts() -> Job:
    nodes = [
        {"user": {"x": normal(404, 4, 5)[i]}, "item": {"x": normal(405, 3, 4)[i]}} for i in range(SAMPLES)
    ]
    edges = [
        {"buys": (uniform(406, 4, 3)[i] < 0.5).float(), "likes": (uniform(407, 4, 3)[i] < 0.3).float()}
        for i in range(SAMPLES)
    ]
    return job_of(RGCN, _links, [{"nodes": n, "edges": e} for n, e in zip(nodes, edges, strict=True)])


VIEWS = {
    "one": normal(408, 7),
    "two": normal(409, 6),
    "label": integers(410, 4),
    "index": torch.arange(SAMPLES),
}


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 13), nn.BatchNorm1d(13), nn.ReLU(inplace=True), nn.Linear(13, outputs)
    )


class CLIP(nn.Module):
    """Two towers; a temperature that is learned and clamped by `data` in the forward's place, in `exp`."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = mlp(7, 5), mlp(6, 5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            F.normalize(self.visual(image), dim=-1),
            F.normalize(self.text(text), dim=-1),
            self.logit_scale.exp().clamp(max=100),
        )


def _clip(model: Any, b: Any) -> Tensor:
    """Over the chunk's pairs: no mean of samples."""
    image, text, scale = model(b["one"], b["two"])
    logits = scale * image @ text.t()
    labels = torch.arange(logits.shape[0], device=logits.device, dtype=torch.long)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip() -> Job:
    return job_of(CLIP, _clip, VIEWS)


class MemoryBank(nn.Module):
    """Instance discrimination: a bank of all samples' features, read at drawn places, written by index; a constant set at first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(7, 5)
        self.register_buffer("memory", F.normalize(torch.randn(SAMPLES, 5), dim=1))
        self.register_buffer("params", torch.tensor([4.0, 0.5, -1.0, 0.5]))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        z = F.normalize(self.net(x), dim=1)
        k, t, _, momentum = self.params.tolist()
        picks = torch.randint(0, SAMPLES, (len(x), int(k) + 1))
        picks.select(1, 0).copy_(index.data)
        weight = torch.index_select(self.memory, 0, picks.view(-1)).view(len(x), int(k) + 1, -1)
        out = torch.bmm(weight, z.unsqueeze(2)).div_(t).exp_().squeeze(2)
        out = out / SAMPLES
        with torch.no_grad():
            old = torch.index_select(self.memory, 0, index)
            new = old.mul_(momentum).add_(z.detach() * (1 - momentum))
            self.memory.index_copy_(0, index, new.div(new.pow(2).sum(1, keepdim=True).pow(0.5)))
        noise = k / SAMPLES
        p, q = out[:, 0], out[:, 1:]
        return -(torch.log(p / (p + noise)).sum() + torch.log(noise / (q + noise)).sum()) / len(x)


def memory_bank_of_instances() -> Job:
    return job_of(MemoryBank, lambda m, b: m(b["one"], b["index"]), VIEWS)


class NNCLR(nn.Module):
    """A queue of supports from which nearest neighbours come, batch norm in the head, symmetric losses."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.f, self.p, self.size = mlp(6, 5), mlp(5, 5), size
        self.register_buffer("queue", F.normalize(torch.randn(size, 5), dim=1))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, z: Tensor) -> None:
        ptr = int(self.ptr)
        if ptr + len(z) > self.size:
            self.queue[ptr:] = z[: self.size - ptr].detach()
            self.ptr[0] = 0
        else:
            self.queue[ptr : ptr + len(z)] = z.detach()
            self.ptr[0] = ptr + len(z)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z1, z2 = (F.normalize(self.f(each), dim=1) for each in (a, b))
        p1, p2 = (F.normalize(self.p(each), dim=1) for each in (z1, z2))
        loss = 0
        for z, p in ((z1, p2), (z2, p1)):
            nn_ = self.queue[(z @ self.queue.t()).argmax(1)].clone()
            loss += F.cross_entropy(nn_ @ p.t() / 0.2, torch.arange(len(p)))
        self.enqueue(z1)
        return loss / 2


def nearest_neighbours_of_a_queue() -> Job:
    return job_of(NNCLR, lambda m, b: m(b["one"][:, :6], b["two"]), VIEWS)


class ClassMeans(nn.Module):
    """Means of classes by a loop over classes present, adaptation of domains by their distances; a logit adjustment by counts."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.classes, self.feat, self.fc = classes, mlp(7, 6), nn.Linear(6, classes)
        self.register_buffer("means", torch.zeros(classes, 6))
        self.register_buffer("counts", torch.ones(classes))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.feat(x)
        pull = z.new_zeros(())
        for c in y.unique():
            own = z[y == c]
            pull = pull + (own.mean(0) - self.means[c]).pow(2).sum()
            if self.training:
                with torch.no_grad():
                    self.means[c] = 0.8 * self.means[c] + 0.2 * own.mean(0)
        if self.training:
            self.counts += torch.bincount(y, minlength=self.classes)
        logits = self.fc(z) + torch.log(self.counts / self.counts.sum())
        return F.cross_entropy(logits, y) + 0.05 * pull / len(y.unique())


def means_of_classes_present() -> Job:
    return job_of(ClassMeans, lambda m, b: m(b["one"], b["label"]), VIEWS)


class iBOT(nn.Module):  # noqa: N801
    """A teacher that follows, a head with weights normalised (old form, its magnitude frozen), centres, masks of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 5))
        self.last = nn.utils.weight_norm(nn.Linear(5, 6, bias=False))
        self.last.weight_g.data.fill_(1)
        self.last.weight_g.requires_grad = False
        self.mask_token = nn.Parameter(torch.zeros(7))
        self.teacher = copy.deepcopy(self.student)
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        masked = torch.rand(x.shape[0]) < 0.5
        inputs = torch.where(masked[:, None], self.mask_token.to(x), x)
        s = self.last(self.student(inputs)) / 0.3
        with torch.no_grad():
            t = self.last(self.teacher(x))
            target = F.softmax((t - self.center) / 0.1, dim=-1)
            self.center = self.center * 0.9 + t.mean(0, keepdim=True) * 0.1
            for q, k in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                k.data.mul_(0.9).add_((1 - 0.9) * q.detach().data)
        each = torch.sum(-target * F.log_softmax(s, -1), dim=-1)
        return (each * masked.to(each)).sum() / masked.sum().clamp(min=1.0)


def masked_self_distillation() -> Job:
    return job_of(iBOT, lambda m, b: m(b["one"]), VIEWS)


def _pairwise_logistic(model: Any, b: Any) -> Tensor:
    """RankNet with weights of positions, over all pairs of the chunk: by sorting, by ranks of ranks, by a mask."""
    s = model(b["one"]).squeeze(-1)
    rel = b["label"].to(s)
    rank = s.detach().argsort(descending=True).argsort() + 1
    discount = 1 / torch.log2(1.0 + rank.to(s))
    gain = 2**rel - 1
    weight = ((gain[:, None] - gain[None]) * (discount[:, None] - discount[None])).abs()
    better = rel[:, None] > rel[None]
    losses = F.softplus(-(s[:, None] - s[None])) * weight
    return losses[better].sum() / len(s)


def lambda_rank() -> Job:
    return job_of(lambda: mlp(7, 1), _pairwise_logistic, VIEWS, optimizer=sgd)

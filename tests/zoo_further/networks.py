"""Graphs: messages by `index_add` and `scatter_reduce`, softmax by segments, edges that are dropped or drawn, relations by type."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import SAMPLES, integers, job_of, normal, uniform

NODES, EDGES, WIDTH = 7, 15, 8


def _collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Graphs side by side: node numbers are moved, and each node knows its graph."""
    count = len(samples)
    offset = torch.arange(count)[:, None, None] * NODES
    return {
        "x": torch.cat([s["x"] for s in samples]),
        "edge_index": (torch.stack([s["edges"] for s in samples]) + offset).transpose(0, 1).flatten(1),
        "edge_attr": torch.cat([s["attr"] for s in samples]),
        "edge_type": torch.cat([s["type"] for s in samples]),
        "batch": torch.arange(count).repeat_interleave(NODES),
        "ptr": torch.arange(count + 1) * NODES,
        "y": torch.stack([s["y"] for s in samples]),
    }


_PARTS = {
    "x": normal(541, NODES, 5),
    "edges": integers(542, NODES, 2, EDGES),
    "attr": normal(543, EDGES, 3),
    "type": integers(544, 3, EDGES),
    "y": integers(545, 4),
}
GRAPHS = [{name: each[i] for name, each in _PARTS.items()} for i in range(SAMPLES)]


def _graph_job(model: Any, loss: Any, **settings: Any) -> Job:
    return job_of(model, loss, GRAPHS, collate=_collate, **settings)


def classify(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b), b["y"])


def scatter(src: Tensor, index: Tensor, size: int, reduce: str) -> Tensor:
    shape = (size, *src.shape[1:])
    rows = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    if reduce in ("sum", "mean"):
        out = src.new_zeros(shape).scatter_add_(0, rows, src)
        if reduce == "mean":
            count = (
                src.new_zeros(size)
                .index_add_(0, index, torch.ones_like(index, dtype=src.dtype))
                .clamp_(min=1)
            )
            out = out / count.view(-1, *[1] * (src.dim() - 1))
        return out
    return src.new_zeros(shape).scatter_reduce_(
        0, rows, src, reduce={"max": "amax", "min": "amin"}[reduce], include_self=False
    )


def segment_softmax(src: Tensor, index: Tensor, size: int) -> Tensor:
    top = scatter(src.detach(), index, size, "max")
    out = (src - top.index_select(0, index)).exp()
    return out / (scatter(out, index, size, "sum").index_select(0, index) + 1e-16)


class PNA(nn.Module):
    """Four aggregators times three scalers of the degree."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.post = nn.Linear(2 * WIDTH + 3, WIDTH), nn.Linear(13 * WIDTH, WIDTH)
        self.average = math.log(3.0)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        h = self.pre(torch.cat([x[target], x[source], edge_attr], -1))
        mean = scatter(h, target, len(x), "mean")
        square = scatter(h * h, target, len(x), "mean")
        out = [
            mean,
            scatter(h, target, len(x), "min"),
            scatter(h, target, len(x), "max"),
            (square - mean**2).clamp(min=1e-5).sqrt(),
        ]
        out = torch.cat(out, -1)
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1).to(x.dtype).unsqueeze(-1)
        scale = torch.log(degree + 1) / self.average
        return self.post(torch.cat([x, out, out * scale, out / scale], -1))


class PNANet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.convs = nn.Linear(5, WIDTH), nn.ModuleList([PNA() for _ in range(2)])
        self.norms, self.head = (
            nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(2)]),
            nn.Linear(2 * WIDTH, 4),
        )

    def forward(self, b: Any) -> Tensor:
        x, size = self.embed(b["x"]), int(b["batch"].max()) + 1
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x, b["edge_index"], b["edge_attr"])))
        return self.head(
            torch.cat([scatter(x, b["batch"], size, "sum"), scatter(x, b["batch"], size, "max")], -1)
        )


def aggregators_by_degree() -> Job:
    return _graph_job(PNANet, classify)


class GATv2(nn.Module):
    """Attention over each node's edges, with features of edges and loops of their mean; heads side by side, then averaged."""

    def __init__(self, inputs: int, heads: int, concat: bool) -> None:
        super().__init__()
        self.left, self.right, self.edge = (
            nn.Linear(inputs, heads * 4),
            nn.Linear(inputs, heads * 4),
            nn.Linear(3, heads * 4, bias=False),
        )
        self.att, self.heads, self.concat = nn.Parameter(torch.randn(1, heads, 4) * 0.5), heads, concat

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        n = len(x)
        keep = edge_index[0] != edge_index[1]
        loops = torch.arange(n).expand(2, -1)
        mean = scatter(edge_attr * keep[:, None], edge_index[1], n, "mean")
        source, target = torch.cat([edge_index, loops], 1)
        left, right = self.left(x).view(n, self.heads, 4), self.right(x).view(n, self.heads, 4)
        h = left[source] + right[target] + self.edge(torch.cat([edge_attr, mean])).view(-1, self.heads, 4)
        alpha = segment_softmax((F.leaky_relu(h, 0.2) * self.att).sum(-1), target, n)
        out = scatter(left[source] * F.dropout(alpha, 0.1, self.training).unsqueeze(-1), target, n, "sum")
        return (out.flatten(1) if self.concat else out.mean(1)), alpha


class GATv2Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.pool, self.head = (
            GATv2(5, 2, True),
            GATv2(8, 3, False),
            nn.Linear(4, 1),
            nn.Linear(4, 4),
        )

    def forward(self, b: Any) -> Tensor:
        x, first = self.one(b["x"], b["edge_index"], b["edge_attr"])
        x, second = self.two(F.elu(x), b["edge_index"], b["edge_attr"])
        self.entropy = -(first * (first + 1e-9).log()).mean() - (second * (second + 1e-9).log()).mean()
        weight = segment_softmax(self.pool(x), b["batch"], len(b["ptr"]) - 1)
        return self.head(
            torch.zeros(len(b["ptr"]) - 1, 4, dtype=x.dtype).index_add(0, b["batch"], weight * x)
        )


def attention_by_segments() -> Job:
    return _graph_job(GATv2Net, lambda m, b: classify(m, b) - 1e-2 * m.entropy)


class RelationalNet(nn.Module):
    """A weight for each type of edge, of few bases; edges that are dropped; rows that are picked by type."""

    def __init__(self) -> None:
        super().__init__()
        self.basis, self.coefficients = (
            nn.Parameter(torch.randn(2, 2, WIDTH, WIDTH) * 0.3),
            nn.Parameter(torch.randn(2, 3, 2)),
        )
        self.embed, self.roots, self.head = (
            nn.Linear(5, WIDTH),
            nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, b: Any) -> Tensor:
        x, edges, types = self.embed(b["x"]), b["edge_index"], b["edge_type"]
        if self.training:
            kept = torch.rand(edges.size(1)) > 0.2
            edges, types = edges[:, kept], types[kept]
        for layer, root in enumerate(self.roots):
            weight = torch.einsum("rb,bio->rio", self.coefficients[layer], self.basis[layer])
            out = root(x)
            for kind in range(weight.size(0)):
                mine = edges[:, types == kind]
                out = out + scatter(x[mine[0]], mine[1], len(x), "mean") @ weight[kind]
            x = torch.tanh(out)
        return self.head(scatter(x, b["batch"], len(b["ptr"]) - 1, "mean"))


def relations_by_type_with_dropped_edges() -> Job:
    return _graph_job(RelationalNet, classify)


class Walks(nn.Module):
    """Positions from random walks and a Laplacian's vectors whose signs are drawn; global attention on dense batches with a mask (GPS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.walk, self.eigen = nn.Linear(5, WIDTH), nn.Linear(3, WIDTH), nn.Linear(2, WIDTH)
        self.local, self.attn = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.mlp, self.head = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 14), nn.ReLU(), nn.Linear(14, WIDTH)),
            nn.Linear(WIDTH, 4),
        )

    @torch.no_grad()
    def positions(self, edges: Tensor, graphs: int, like: Tensor) -> tuple[Tensor, Tensor]:
        dense = (
            torch.zeros(graphs * NODES, NODES)
            .to(like)
            .index_put_((edges[0], edges[1] % NODES), torch.ones(()).to(like))
        )
        dense = dense.view(graphs, NODES, NODES)
        dense = ((dense + dense.mT) > 0).to(like)
        degree = dense.sum(-1).clamp(min=1)
        step, walk, kept = dense / degree.unsqueeze(-1), torch.eye(NODES).to(like).expand_as(dense), []
        for _ in range(3):
            walk = walk @ step
            kept.append(walk.diagonal(dim1=1, dim2=2))
        tilt = 1e-3 * torch.diag(torch.arange(NODES).to(like) ** 1.5)
        laplacian = (
            torch.eye(NODES).to(like) - dense / (degree.unsqueeze(-1) * degree.unsqueeze(-2)).sqrt() + tilt
        )
        vectors = torch.linalg.eigh(laplacian)[1][..., 1:3]
        sign = torch.where(torch.rand(graphs, 1, 2) < 0.5, -1.0, 1.0).to(like)
        return torch.stack(kept, -1), vectors.abs() * sign

    def forward(self, b: Any) -> Tensor:
        graphs = len(b["ptr"]) - 1
        walk, eigen = self.positions(b["edge_index"], graphs, b["x"])
        x = self.embed(b["x"]) + (self.walk(walk) + self.eigen(eigen)).flatten(0, 1)
        h = F.relu(self.local(scatter(x[b["edge_index"][0]], b["edge_index"][1], len(x), "mean")))
        dense = x.view(graphs, NODES, WIDTH)
        hidden = dense.new_zeros(graphs, NODES, dtype=torch.bool)
        hidden[:, -1] = b["x"].view(graphs, NODES, 5)[:, -1, 0] > 0
        dense = self.attn(dense, dense, dense, key_padding_mask=hidden, need_weights=False)[0].flatten(0, 1)
        x = self.norm(x + h + dense)
        return self.head(scatter(x + self.mlp(x), b["batch"], graphs, "mean"))


def walks_and_laplacians() -> Job:
    return _graph_job(Walks, classify)


class Links(nn.Module):
    """Encodes with layers that jump to the end; scores edges against drawn ones (link prediction)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.jump = (
            nn.ModuleList([nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)]),
            nn.LSTM(WIDTH, 6, bidirectional=True, batch_first=True),
        )
        self.attend, self.out = nn.Linear(12, 1), nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor, edges: Tensor) -> Tensor:
        kept = []
        degree = (
            torch.zeros(len(x), dtype=x.dtype).index_add_(
                0, edges[1], torch.ones(edges.size(1), dtype=x.dtype)
            )
            + 1
        )
        weight = (degree[edges[0]] * degree[edges[1]]).rsqrt().unsqueeze(-1)
        for layer in self.layers:
            h = layer(x)
            x = F.relu(
                h / degree.unsqueeze(-1) + torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]] * weight)
            )
            kept.append(x)
        stacked = torch.stack(kept, 1)
        weights = self.attend(self.jump(stacked)[0]).softmax(1)
        return self.out((stacked * weights).sum(1))

    def forward(self, b: Any) -> tuple[Tensor, Tensor]:
        edges = b["edge_index"]
        z = self.encode(b["x"], edges)
        tail = edges[0] // NODES * NODES + torch.randint(0, NODES, (edges.size(1),))
        return (z[edges[0]] * z[edges[1]]).sum(-1), (z[edges[0]] * z[tail]).sum(-1)


def _links(model: Any, b: Any) -> Tensor:
    positive, negative = model(b)
    score = torch.cat([positive, negative])
    return F.binary_cross_entropy_with_logits(
        score, torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
    )


def links_against_drawn_ones() -> Job:
    return _graph_job(Links, _links)


class Normalised(nn.Module):
    """Statistics of inputs gathered until a count is reached (MeshGraphNets); messages keep updating edges; a virtual node for each graph."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "square"):
            self.register_buffer(name, torch.zeros(5))
        self.register_buffer("seen", torch.zeros(()))
        self.node, self.edge, self.virtual = nn.Linear(5, WIDTH), nn.Linear(3, WIDTH), nn.Embedding(1, WIDTH)
        mlp = lambda i: nn.Sequential(nn.Linear(i, 11), nn.ReLU(), nn.Linear(11, WIDTH), nn.LayerNorm(WIDTH))  # noqa: E731
        self.edges, self.nodes = (
            nn.ModuleList([mlp(3 * WIDTH) for _ in range(2)]),
            nn.ModuleList([mlp(2 * WIDTH) for _ in range(2)]),
        )
        self.gru, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def normalise(self, x: Tensor) -> Tensor:
        if self.training and self.seen < 1000:
            with torch.no_grad():
                self.total += x.sum(0)
                self.square += (x**2).sum(0)
                self.seen += len(x)
        mean = self.total / self.seen.clamp(min=1)
        std = torch.maximum(
            (self.square / self.seen.clamp(min=1) - mean**2).clamp(min=0).sqrt(), torch.tensor(1e-3).to(x)
        )
        return (x - mean) / std

    def forward(self, b: Any) -> Tensor:
        (source, target), graphs = b["edge_index"], len(b["ptr"]) - 1
        x, e = self.node(self.normalise(b["x"])), self.edge(b["edge_attr"])
        v = self.virtual(torch.zeros(graphs, dtype=torch.long))
        for edges, nodes in zip(self.edges, self.nodes, strict=True):
            x = x + v[b["batch"]]
            e = e + edges(torch.cat([e, x[source], x[target]], -1))
            x = x + nodes(torch.cat([x, torch.zeros_like(x).index_add(0, target, e)], -1))
            v = self.gru(scatter(x, b["batch"], graphs, "sum"), v)
        return self.head(v)


def statistics_until_enough() -> Job:
    return _graph_job(Normalised, classify)


class Triplets(nn.Module):
    """Angles between edges that share a node, found by comparing all pairs of edges (DimeNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rbf, self.sbf = (
            nn.Embedding(4, WIDTH),
            nn.Linear(4, WIDTH, bias=False),
            nn.Linear(3, WIDTH, bias=False),
        )
        self.message, self.bilinear = nn.Linear(3 * WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, 1))

    def forward(self, z: Tensor, position: Tensor) -> Tensor:
        n = position.size(1)
        source, target = (~torch.eye(n, dtype=torch.bool)).nonzero().T
        difference = position[:, target] - position[:, source]
        distance = difference.norm(dim=-1, keepdim=True)
        rbf = torch.sin(distance * torch.arange(1, 5).to(distance)) / distance
        h = self.embed(z)
        m = F.silu(self.message(torch.cat([h[:, source], h[:, target], self.rbf(rbf)], -1)))
        kj, ji = ((target[:, None] == source[None]) & (source[:, None] != target[None])).nonzero(
            as_tuple=True
        )
        cosine = F.cosine_similarity(-difference[:, kj], difference[:, ji], dim=-1).unsqueeze(-1)
        angular = self.sbf(
            torch.cat([cosine, 2 * cosine**2 - 1, 4 * cosine**3 - 3 * cosine], -1) * rbf[:, kj, :3]
        )
        m = m + torch.zeros_like(m).index_add(1, ji, self.bilinear(m[:, kj], angular))
        return self.out(torch.zeros_like(h).index_add(1, target, m)).sum((1, 2))


def angles_of_pairs_of_edges() -> Job:
    data = {"z": integers(546, 4, 4), "position": normal(547, 4, 3) * 2, "energy": uniform(548)}
    return job_of(Triplets, lambda m, b: F.mse_loss(m(b["z"], b["position"]), b["energy"]), data)

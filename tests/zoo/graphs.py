"""Graph networks: messages gathered by index and summed by scatter, neighbours by distance, pooling by score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import SAMPLES, integers, job_of, normal

NODES, EDGES = 7, 15
X, Y = normal(31, NODES, 5), integers(32, 3)
EDGE = torch.stack([integers(33, NODES, EDGES), integers(34, NODES, EDGES)], 1)
DATA = {"x": X, "edge_index": EDGE, "y": Y}


def flat(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One big graph of a batch: nodes, edges between them, and the graph of each node."""
    x, edges = batch["x"], batch["edge_index"]
    n = x.size(1)
    shift = torch.arange(x.size(0)).view(-1, 1, 1) * n
    index = (edges + shift).permute(1, 0, 2).reshape(2, -1)
    graph = torch.arange(x.size(0)).repeat_interleave(n)
    return x.reshape(-1, x.size(2)), index, graph


def pool(x: Tensor, graph: Tensor, size: int) -> Tensor:
    out = torch.zeros(size, x.size(1), dtype=x.dtype)
    out.index_add_(0, graph, x)
    count = torch.zeros(size, dtype=x.dtype).index_add_(0, graph, torch.ones_like(graph, dtype=x.dtype))
    return out / count.clamp(min=1).unsqueeze(1)


def _loss(model: Any, batch: Any) -> Tensor:
    x, index, graph = flat(batch)
    return F.cross_entropy(model(x, index, graph, batch["x"].size(0)), batch["y"])


class GraphNet(nn.Module):
    """Two layers of a kind, a mean over each graph's nodes, a head."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList([layer(5, 9), layer(9, 9)])
        self.lin = nn.Linear(9, 3)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, size: int) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
        return self.lin(pool(x, graph, size))


class GCNLayer(nn.Module):
    """With a sparse adjacency, of which degrees are taken to the power of -1/2 and infinities set to zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        n = x.size(0)
        row, col = edge_index
        deg = torch.zeros(n, dtype=x.dtype).scatter_add_(0, row, torch.ones(row.size(0), dtype=x.dtype))
        inv = deg.pow(-0.5)
        inv[inv == float("inf")] = 0
        values = inv[row] * inv[col]
        adj = torch.sparse_coo_tensor(edge_index, values, (n, n))
        return torch.sparse.mm(adj, x @ self.weight) + self.bias


def gcn_with_sparse_adjacency() -> Job:
    return job_of(lambda: GraphNet(GCNLayer), _loss, DATA)


class GATLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.size = heads, outputs // heads
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.att_src = nn.Parameter(0.3 * torch.randn(1, heads, self.size))
        self.att_dst = nn.Parameter(0.3 * torch.randn(1, heads, self.size))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.size)
        alpha = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        alpha = F.leaky_relu(alpha, 0.2)
        top = torch.full((x.size(0), self.heads), float("-inf"), dtype=x.dtype)
        top = top.scatter_reduce(0, dst[:, None].expand_as(alpha), alpha.detach(), "amax")
        alpha = (alpha - top[dst]).exp()
        total = torch.zeros(x.size(0), self.heads, dtype=x.dtype).index_add(0, dst, alpha)
        alpha = alpha / (total[dst] + 1e-16)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * alpha.unsqueeze(-1))
        return out.reshape(x.size(0), -1)


def gat() -> Job:
    return job_of(lambda: GraphNet(GATLayer), _loss, DATA)


class SAGELayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index[0], edge_index[1]
        out = x.new_zeros(x.size(0), x.size(1))
        out.scatter_add_(0, dst.unsqueeze(-1).expand(-1, x.size(1)), x[src])
        deg = torch.bincount(dst, minlength=x.size(0)).clamp(min=1)
        out = out / deg.unsqueeze(-1)
        return F.normalize(self.lin_l(out) + self.lin_r(x), p=2.0, dim=-1)


def graph_sage() -> Job:
    return job_of(lambda: GraphNet(SAGELayer), _loss, DATA)


class GINLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(
            nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Linear(outputs, outputs)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out.index_add_(0, edge_index[1], x[edge_index[0]])
        return self.mlp((1 + self.eps) * x + out)


def gin() -> Job:
    return job_of(lambda: GraphNet(GINLayer), _loss, DATA)


class EdgeConv(nn.Module):
    """The greatest message of the nearest neighbours in feature space."""

    def __init__(self, inputs: int, outputs: int, k: int = 3) -> None:
        super().__init__()
        self.k, self.mlp = k, nn.Sequential(nn.Linear(2 * inputs, outputs), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        inner = -2 * torch.matmul(x, x.transpose(2, 1))
        xx = torch.sum(x**2, dim=2, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=self.k, dim=-1)[1]
        b, n, c = x.size()
        idx = (idx + torch.arange(0, b).view(-1, 1, 1) * n).view(-1)
        feature = x.reshape(b * n, -1)[idx, :].view(b, n, self.k, c)
        center = x.view(b, n, 1, c).repeat(1, 1, self.k, 1)
        return self.mlp(torch.cat((feature - center, center), dim=3)).max(dim=2)[0]


class DGCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = EdgeConv(5, 9), EdgeConv(9, 9), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.one(x)
        x2 = self.two(x1)
        x = torch.cat([x1, x2], -1)
        return self.head(torch.cat([x.max(1)[0], x.mean(1)], 1))


def edge_conv() -> Job:
    return job_of(DGCNN, lambda model, b: F.cross_entropy(model(b["x"]), b["y"]), DATA)


class MPNN(nn.Module):
    """Matrices of edges, a GRU for nodes, set2set's read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin0 = nn.Linear(5, 7)
        self.edge = nn.Sequential(nn.Linear(1, 6), nn.ReLU(), nn.Linear(6, 49))
        self.gru, self.lstm, self.head = nn.GRUCell(7, 7), nn.LSTMCell(14, 7), nn.Linear(14, 3)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, size: int) -> Tensor:
        src, dst = edge_index
        distance = (x[src] - x[dst]).pow(2).sum(-1, keepdim=True).sqrt()
        out = h = F.relu(self.lin0(x))
        weight = self.edge(distance).view(-1, 7, 7)
        for _ in range(2):
            message = torch.bmm(out[src].unsqueeze(1), weight).squeeze(1)
            m = F.relu(torch.zeros_like(out).index_add(0, dst, message))
            out = h = self.gru(m, h)
        q, hidden = out.new_zeros(size, 14), (out.new_zeros(size, 7), out.new_zeros(size, 7))
        for _ in range(2):
            hidden = self.lstm(q, hidden)
            e = (out * hidden[0][graph]).sum(dim=-1, keepdim=True).exp()
            a = e / (torch.zeros(size, 1, dtype=e.dtype).index_add(0, graph, e)[graph] + 1e-12)
            q = torch.cat([hidden[0], torch.zeros_like(hidden[0]).index_add(0, graph, a * out)], -1)
        return self.head(q)


def mpnn_with_set2set() -> Job:
    return job_of(MPNN, _loss, DATA)


class SchNet(nn.Module):
    """Continuous filters between atoms nearer than a cutoff, found by boolean indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 9)
        self.filters = nn.ModuleList([nn.Sequential(nn.Linear(8, 9), nn.Softplus(), nn.Linear(9, 9)) for _ in range(2)])  # fmt: skip
        self.linears = nn.ModuleList([nn.Linear(9, 9) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(9, 5), nn.Softplus(), nn.Linear(5, 1))
        self.register_buffer("offset", torch.linspace(0.0, 3.0, 8))
        self.offset: Tensor

    def forward(self, z: Tensor, pos: Tensor) -> Tensor:
        energies = []
        for i in range(z.size(0)):
            h, p = self.embedding(z[i]), pos[i]
            d = (p.unsqueeze(0) - p.unsqueeze(1)).pow(2).sum(-1)
            mask = (d < 4.0) & ~torch.eye(len(p), dtype=torch.bool)
            row, col = mask.nonzero().t()
            dist = d[row, col].sqrt()
            rbf = torch.exp(-2.0 * (dist.view(-1, 1) - self.offset.view(1, -1)) ** 2)
            for f, lin in zip(self.filters, self.linears, strict=True):
                h = h + F.softplus(lin(torch.zeros_like(h).index_add(0, col, h[row] * f(rbf))))
            energies.append(self.head(h).sum())
        return torch.stack(energies)


def schnet_with_cutoff() -> Job:
    data = {"z": integers(35, 4, NODES), "pos": normal(36, NODES, 3), "e": normal(37)}
    return job_of(SchNet, lambda m, b: F.l1_loss(m(b["z"], b["pos"]), b["e"]), data)


class DiffPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.assign, self.embed2, self.head = (
            nn.Linear(5, 9), nn.Linear(5, 4), nn.Linear(9, 9), nn.Linear(9, 3),
        )  # fmt: skip

    def forward(self, x: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        adj = adj / adj.sum(-1, keepdim=True).clamp(min=1)
        z, s = F.relu(self.embed(adj @ x)), torch.softmax(self.assign(adj @ x), dim=-1)
        pooled, small = s.transpose(1, 2) @ z, s.transpose(1, 2) @ adj @ s
        link = torch.norm(adj - torch.matmul(s, s.transpose(1, 2)), p=2) / adj.numel()
        entropy = (-s * torch.log(s + 1e-15)).sum(dim=-1).mean()
        return self.head(F.relu(self.embed2(small @ pooled)).mean(1)), link + entropy


def _pooled(model: Any, batch: Any) -> Tensor:
    adj = torch.zeros(batch["x"].size(0), NODES, NODES, dtype=batch["x"].dtype)
    for i in range(adj.size(0)):
        adj[i, batch["edge_index"][i, 0], batch["edge_index"][i, 1]] = 1.0
    logits, extra = model(batch["x"], adj)
    return F.cross_entropy(logits, batch["y"]) + 0.1 * extra


def diff_pool() -> Job:
    return job_of(DiffPool, _pooled, DATA)


class TopKPool(nn.Module):
    """The best half of each graph's nodes, as many as there are, loop over graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score, self.head = SAGELayer(5, 9), nn.Linear(9, 1), nn.Linear(9, 3)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, size: int) -> Tensor:
        x = F.relu(self.conv(x, edge_index))
        score = torch.tanh(self.score(x)).squeeze(-1)
        pooled = []
        for i in range(size):
            mine = (graph == i).nonzero(as_tuple=False).view(-1)
            k = max(1, int(0.5 * mine.numel()))
            best = mine[score[mine].topk(k)[1]]
            pooled.append((x[best] * score[best].view(-1, 1)).mean(0))
        return self.head(torch.stack(pooled))


def top_k_pooling() -> Job:
    return job_of(TopKPool, _loss, DATA)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mu, self.logstd = GCNLayer(5, 9), SAGELayer(9, 4), SAGELayer(9, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.conv(x, edge_index))
        mu, logstd = self.mu(h, edge_index), self.logstd(h, edge_index).clamp(max=10)
        return mu, logstd, mu + torch.randn_like(logstd) * torch.exp(logstd)


def _reconstruction(model: Any, batch: Any) -> Tensor:
    x, edge_index, _ = flat(batch)
    mu, logstd, z = model(x, edge_index)
    negative = torch.randint(0, x.size(0), edge_index.size())
    pos = -torch.log(torch.sigmoid((z[edge_index[0]] * z[edge_index[1]]).sum(1)) + 1e-15).mean()
    neg = -torch.log(1 - torch.sigmoid((z[negative[0]] * z[negative[1]]).sum(1)) + 1e-15).mean()
    kl = -0.5 * torch.mean(torch.sum(1 + 2 * logstd - mu**2 - logstd.exp() ** 2, dim=1))
    return pos + neg + kl / x.size(0)


def variational_graph_autoencoder() -> Job:
    return job_of(Encoder, _reconstruction, DATA)


class InteractionNetwork(nn.Module):
    """A simulator of particles: edges between near ones, residual nodes and edges."""

    def __init__(self) -> None:
        super().__init__()
        mlp = lambda i, o: nn.Sequential(nn.Linear(i, 9), nn.ReLU(), nn.Linear(9, o), nn.LayerNorm(o))  # noqa: E731
        self.node, self.edge = mlp(5, 7), mlp(3, 7)
        self.edges = nn.ModuleList([mlp(21, 7) for _ in range(2)])
        self.nodes = nn.ModuleList([mlp(14, 7) for _ in range(2)])
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        dist = torch.cdist(x[:, :2], x[:, :2])
        src, dst = torch.where((dist < 1.0) & (dist > 0))
        v = self.node(x)
        e = self.edge(torch.cat([x[src, :2] - x[dst, :2], dist[src, dst].unsqueeze(-1)], -1))
        for edge, node in zip(self.edges, self.nodes, strict=True):
            e = e + edge(torch.cat([e, v[src], v[dst]], -1))
            v = v + node(torch.cat([v, torch.zeros(n, 7, dtype=v.dtype).index_add_(0, dst, e)], -1))
        return self.head(v)


def particle_simulator() -> Job:
    assert X.size(0) == SAMPLES
    return job_of(
        InteractionNetwork,
        lambda model, b: torch.stack(
            [F.mse_loss(model(x), a) for x, a in zip(b["x"], b["a"], strict=True)]
        ).mean(),
        {"x": X, "a": normal(38, NODES, 2)},
    )

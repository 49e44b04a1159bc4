"""Experts, tables with sparse gradients, bags of embeddings, and graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.attention import next_token, texts
from tests.equality.models.dense import classify, vectors


class Experts(nn.Module):
    """[batch, 7] -> [batch, 5]: four experts in stacked weights, all of which compute, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 4)
        self.up = nn.Parameter(0.3 * torch.randn(4, 7, 10))
        self.down = nn.Parameter(0.3 * torch.randn(4, 10, 7))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.einsum("bi,eio->beo", x, self.up)
        outer = torch.einsum("beo,eoi->bei", F.gelu(inner), self.down)
        return self.head(x + (self.gate(x).softmax(-1).unsqueeze(-1) * outer).sum(1))


class TopTwo(nn.Module):
    """Tokens [batch, 4] -> logits [batch, 4, 9]: two of four experts for each token, by a mask over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(4, 8, 12))
        self.down = nn.Parameter(0.3 * torch.randn(4, 12, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        chances = self.router(x).softmax(-1)
        best, which = chances.topk(2, dim=-1)
        weights = torch.zeros_like(chances).scatter(-1, which, best / best.sum(-1, keepdim=True))
        inner = F.silu(torch.einsum("bli,eio->bleo", x, self.up))
        mixed = torch.einsum("bleo,eoi,ble->bli", inner, self.down, weights)
        return self.head(self.norm(x + mixed))


class Routed(nn.Module):
    """[batch, 6] -> [batch, 4]: a list of experts that compute all samples, and a shared one; a loss of balance."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.shared = nn.Sequential(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 6))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        chosen = F.one_hot(chances.argmax(-1), 3).to(x.dtype)
        mixed = self.shared(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + (chosen * chances)[:, number, None] * expert(x)
        return self.head(x + mixed), 3 * (chosen.mean(0) * chances.mean(0)).sum()


class DLRM(nn.Module):
    """Numbers [batch, 5] and categories [batch, 3] -> [batch]: tables, and products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 6, sparse=True) for rows in (31, 17, 9))
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.top = nn.Sequential(nn.Linear(6 + 6, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        found = [self.bottom(numbers), *(table(categories[:, at]) for at, table in enumerate(self.tables))]
        both = torch.stack(found, dim=1)
        rows, columns = torch.triu_indices(4, 4, offset=1)
        products = torch.bmm(both, both.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([found[0], products], dim=-1)).squeeze(-1)


class Bags(nn.Module):
    """Tokens [batch, 5] -> [batch, 4]: a mean and a weighted sum over bags, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(19, 7, mode="mean", padding_idx=0)
        self.sum = nn.EmbeddingBag(19, 5, mode="sum")
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.head(torch.cat([self.mean(x), self.sum(x, per_sample_weights=weights)], dim=-1))


class SkipGram(nn.Module):
    """A word, its neighbour and 3 others [batch, 5] -> [batch, 4]: two tables alone, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 8, sparse=True)
        self.contexts = nn.Embedding(37, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,bni->bn", self.words(x[:, 0]), self.contexts(x[:, 1:]))


class Factors(nn.Module):
    """User and item [batch, 2] -> [batch]: factors and biases, and a towered score."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(13, 6), nn.Embedding(11, 6)
        self.user_bias, self.item_bias = nn.Embedding(13, 1), nn.Embedding(11, 1)
        self.tower = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 1))
        self.mean = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.users(x[:, 0]), self.items(x[:, 1])
        biases = (
            self.user_bias(x[:, 0]) + self.item_bias(x[:, 1]) + self.tower(torch.cat([user, item], dim=-1))
        )
        return (user * item).sum(-1) + biases.squeeze(-1) + self.mean


class Graph(nn.Module):
    """Nodes [batch, 6, 4] and edges [batch, 6, 6] -> [batch, 3]: messages along edges, attention over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.message = nn.Linear(8, 8, bias=False)
        self.source, self.target = nn.Linear(8, 2), nn.Linear(8, 2)
        self.value = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        x = x + F.gelu(torch.bmm(edges, self.message(x)) / edges.sum(-1, keepdim=True))
        scores = F.leaky_relu(self.source(x).unsqueeze(1) + self.target(x).unsqueeze(2), 0.2)
        weights = scores.masked_fill(edges.unsqueeze(-1) == 0, -1e9).softmax(dim=2)
        x = x + torch.einsum("bnmh,bmhd->bnhd", weights, self.value(x).unflatten(-1, (2, 4))).flatten(2)
        return self.head(x.mean(1))


def balanced(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found, balance = model(batch["x"])
    return F.cross_entropy(found, batch["y"]) + 0.1 * balance


def clicks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["x"], batch["categories"]), batch["y"])


def bagged(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["weights"]), batch["y"])


def neighbours(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    return F.softplus(-scores[:, 0]).mean() + F.softplus(scores[:, 1:]).sum(1).mean()


def rated(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def connected(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edges"]), batch["y"])


def adverts(count: int) -> Samples:
    categories = torch.stack([whole(50 + rows, rows, count) for rows in (31, 17, 9)], dim=1)
    return Samples(x=normal(50, count, 5), categories=categories, y=whole(51, 2, count).float())


def bags(count: int) -> Samples:
    return Samples(x=whole(52, 19, count, 5), weights=normal(53, count, 5), y=whole(54, 4, count))


def words(count: int) -> Samples:
    return Samples(x=whole(55, 37, count, 5))


def ratings(count: int) -> Samples:
    return Samples(x=torch.stack([whole(56, 13, count), whole(57, 11, count)], dim=1), y=normal(58, count))


def graphs(count: int) -> Samples:
    edges = torch.maximum(whole(60, 2, count, 6, 6).float(), torch.eye(6))
    return Samples(x=normal(59, count, 6, 4), edges=edges, y=whole(61, 3, count))


SPARSE = [
    Model(
        name="experts",
        features="stacked experts; experts = batch",
        build=Experts,
        loss=classify,
        samples=vectors(7, 5, seed=62),
        chunk=4,
        stages=2,
    ),
    Model(
        name="top_two",
        features="two experts a token; experts = length",
        build=TopTwo,
        loss=next_token,
        samples=texts(9, 4, seed=63),
        stages=2,
    ),
    Model(
        name="routed",
        interacts=True,
        features="a list of experts, a shared one, a loss of balance",
        build=Routed,
        loss=balanced,
        samples=vectors(6, 4, seed=64),
        stages=2,
    ),
    Model(
        name="dlrm",
        features="sparse tables, products of pairs",
        build=DLRM,
        loss=clicks,
        samples=adverts,
        stages=2,
        sparse=True,
    ),
    Model(
        name="bags",
        features="bags of embeddings",
        build=Bags,
        loss=bagged,
        samples=bags,
        stages=2,
    ),
    Model(
        name="skip_gram",
        features="sparse tables alone",
        build=SkipGram,
        loss=neighbours,
        samples=words,
        stages=1,
        sparse=True,
    ),
    Model(
        name="factors",
        features="tables, biases, a scalar",
        build=Factors,
        loss=rated,
        samples=ratings,
        stages=2,
    ),
    Model(
        name="graph",
        features="messages, attention over neighbours",
        build=Graph,
        loss=connected,
        samples=graphs,
        chunk=2,
        stages=2,
    ),
]

"""Recommenders: tables, crosses of fields, negatives of the batch, behaviours attended to, many tasks at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import adam, integers, job_of, normal, sgd

FIELDS, SIZES = 4, (11, 7, 13, 5)
CLICKS = {
    "dense": normal(91, 3), "sparse": torch.stack([integers(92 + i, size) for i, size in enumerate(SIZES)], 1), "label": integers(99, 2).float(),
    "history": integers(100, 13, 5), "history_len": integers(101, 6, least=1), "second": integers(102, 2).float(),
}  # fmt: skip


def _click(model: Any, b: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(b["dense"], b["sparse"]), b["label"])


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList()
        for size in SIZES:
            bag = nn.EmbeddingBag(size, 5, mode="sum")
            bag.weight.data.uniform_(-((1 / size) ** 0.5), (1 / size) ** 0.5)
            self.emb_l.append(bag)
        self.bot = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(5 + 10, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bot(dense)
        offsets = torch.arange(sparse.size(0))
        ly = [emb(sparse[:, k], offsets) for k, emb in enumerate(self.emb_l)]
        T = torch.cat([x, *ly], dim=1).view((x.size(0), -1, 5))  # noqa: N806
        Z = torch.bmm(T, torch.transpose(T, 1, 2))  # noqa: N806
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return self.top(torch.cat([x, Z[:, li, lj]], dim=1)).squeeze(1)


def dlrm() -> Job:
    return job_of(DLRM, _click, CLICKS)


class FeaturesEmbedding(nn.Module):
    """All fields in one table, offsets added."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(SIZES), dim)
        self.register_buffer("offsets", torch.tensor((0, 11, 18, 31)), persistent=False)
        self.offsets: Tensor
        nn.init.xavier_uniform_(self.embedding.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0) if False else x + self.offsets.unsqueeze(0)
        return self.embedding(x)


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding, self.bias = FeaturesEmbedding(1), FeaturesEmbedding(5), nn.Parameter(torch.zeros((1,)))  # fmt: skip
        layers: list[nn.Module] = []
        width = FIELDS * 5
        for size in (9, 7):
            layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Dropout(p=0.2)]
            width = size
        layers.append(nn.Linear(width, 1))
        self.mlp = nn.Sequential(*layers)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        e = self.embedding(sparse)
        square_of_sum, sum_of_square = torch.sum(e, dim=1) ** 2, torch.sum(e**2, dim=1)
        fm = 0.5 * torch.sum(square_of_sum - sum_of_square, dim=1, keepdim=True)
        x = torch.sum(self.linear(sparse), dim=1) + self.bias + fm + self.mlp(e.view(-1, FIELDS * 5))
        return x.squeeze(1)


def deep_fm() -> Job:
    return job_of(DeepFM, _click, CLICKS)


class DCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = FeaturesEmbedding(5)
        self.kernels = nn.ParameterList([nn.Parameter(torch.randn(23, 23) * 0.2) for _ in range(2)])
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(23, 1)) for _ in range(2)])
        self.head = nn.Linear(23, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x0 = torch.cat([self.embedding(sparse).flatten(1), dense], 1).unsqueeze(2)
        x = x0
        for w, b in zip(self.kernels, self.bias, strict=True):
            x = x0 * (torch.matmul(w, x) + b) + x
        return self.head(torch.squeeze(x, dim=2)).squeeze(1)


def deep_cross() -> Job:
    return job_of(DCN, _click, CLICKS)


class AutoInt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = FeaturesEmbedding(6)
        self.attns = nn.ModuleList([nn.MultiheadAttention(6, 3, dropout=0.1) for _ in range(2)])
        self.res, self.fc = nn.Linear(6, 6), nn.Linear(FIELDS * 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.embedding(sparse)
        cross = x.transpose(0, 1)
        for attn in self.attns:
            cross, _ = attn(cross, cross, cross)
        cross = F.relu(cross.transpose(0, 1) + self.res(x)).contiguous().view(-1, FIELDS * 6)
        return self.fc(cross).squeeze(1)


def auto_int() -> Job:
    return job_of(AutoInt, _click, CLICKS)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(11, 9), nn.Embedding(13, 9)
        self.user_mlp, self.item_mlp = (
            nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5)),
            nn.Linear(9, 5),
        )
        self.logit_scale = nn.Parameter(torch.ones([]) * 1.5)

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.user_mlp(self.user(user)), dim=-1), F.normalize(
            self.item_mlp(self.item(item)), dim=-1
        )


def _in_batch(model: Any, b: Any) -> Tensor:
    """Other rows' items are negatives, but for those that are the same item."""
    users, items = model(b["sparse"][:, 0], b["sparse"][:, 2])
    scores = users @ items.t() * model.logit_scale.exp().clamp(max=20)
    same = b["sparse"][:, 2].unsqueeze(0) == b["sparse"][:, 2].unsqueeze(1)
    same.fill_diagonal_(False)
    scores = scores.masked_fill(same, torch.finfo(scores.dtype).min)
    labels = torch.arange(scores.size(0), device=scores.device)
    return F.cross_entropy(scores, labels)


def two_tower() -> Job:
    return job_of(TwoTower, _in_batch, CLICKS)


class NCF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(11, 5), nn.Embedding(13, 5)
        self.user_mlp, self.item_mlp = nn.Embedding(11, 7), nn.Embedding(13, 7)
        self.mlp = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(14, 7), nn.ReLU(), nn.Dropout(0.1), nn.Linear(7, 3)
        )
        self.predict = nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        gmf = self.user_gmf(user) * self.item_gmf(item)
        deep = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.predict(torch.cat((gmf, deep), -1)).view(-1)


def _bpr(model: Any, b: Any) -> Tensor:
    user, positive = b["sparse"][:, 0], b["sparse"][:, 2]
    negative = torch.randint(0, 13, positive.shape)
    diff = model(user, positive) - model(user, negative)
    regular = sum(p.norm(2).pow(2) for name, p in model.named_parameters() if "user" in name)
    return -(F.logsigmoid(diff)).mean() + 1e-3 * regular


def bayesian_personalised_ranking() -> Job:
    return job_of(NCF, _bpr, CLICKS, optimizer=sgd)


class Dice(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.bn, self.alpha = nn.BatchNorm1d(size, affine=False), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.bn(x))
        return self.alpha * (1 - p) * x + p * x


class DIN(nn.Module):
    """Behaviours weighed by the candidate, padding masked by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(13, 6, padding_idx=0)
        self.att = nn.Sequential(nn.Linear(24, 7), nn.PReLU(), nn.Linear(7, 1))
        self.one, self.dice, self.two = nn.Linear(12, 9), Dice(9), nn.Linear(9, 1)

    def forward(self, candidate: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        q, keys = self.item(candidate), self.item(history)
        queries = q.unsqueeze(1).expand(-1, keys.size(1), -1)
        scores = self.att(torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)).transpose(1, 2)
        mask = (torch.arange(keys.size(1)).repeat(len(lengths), 1) < lengths.view(-1, 1)).unsqueeze(1)
        scores = torch.where(mask, scores, torch.zeros_like(scores))
        interest = torch.matmul(scores, keys).squeeze(1)
        return self.two(self.dice(self.one(torch.cat([interest, q], -1)))).squeeze(-1)


def deep_interest() -> Job:
    loss = lambda m, b: F.binary_cross_entropy_with_logits(m(b["sparse"][:, 2], b["history"], b["history_len"]), b["label"])  # noqa: E731  # fmt: skip
    return job_of(DIN, loss, CLICKS)


class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.position = nn.Embedding(14, 8, padding_idx=0), nn.Embedding(5, 8)
        self.norms, self.attns = nn.ModuleList([nn.LayerNorm(8) for _ in range(2)]), nn.ModuleList([nn.MultiheadAttention(8, 2, 0.1) for _ in range(2)])  # fmt: skip
        self.convs = nn.ModuleList([nn.Conv1d(8, 8, kernel_size=1) for _ in range(2)])

    def forward(self, seqs: Tensor) -> Tensor:
        x = self.item(seqs) * 8**0.5 + self.position(torch.arange(seqs.shape[1]).repeat(seqs.shape[0], 1))
        timeline = seqs == 0
        x = x * ~timeline.unsqueeze(-1)
        causal = ~torch.tril(torch.ones((seqs.shape[1], seqs.shape[1]), dtype=torch.bool))
        for norm, attn, conv in zip(self.norms, self.attns, self.convs, strict=True):
            x = torch.transpose(x, 0, 1)
            q = norm(x)
            y, _ = attn(q, x, x, attn_mask=causal)
            x = torch.transpose(q + y, 0, 1)
            x = x + F.relu(conv(x.transpose(-1, -2))).transpose(-1, -2)
            x = x * ~timeline.unsqueeze(-1)
        return x


def _next_item(model: Any, b: Any) -> Tensor:
    seqs = b["history"]
    found, pos = model(seqs[:, :-1]), seqs[:, 1:]
    neg = torch.randint(1, 14, pos.shape)
    indices = torch.where(pos != 0)
    one, other = (found * model.item(pos)).sum(-1), (found * model.item(neg)).sum(-1)
    bce = nn.BCEWithLogitsLoss()
    return bce(one[indices], torch.ones_like(one)[indices]) + bce(
        other[indices], torch.zeros_like(other)[indices]
    )


def self_attentive_sequential() -> Job:
    return job_of(SASRec, _next_item, CLICKS)


class MMoE(nn.Module):
    """Experts and a gate a task; the two losses are weighed by learnt uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 7)) for _ in range(3)]
        )
        self.gates = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.towers = nn.ModuleList([nn.Linear(7, 1) for _ in range(2)])
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        experts = torch.stack([e(x) for e in self.experts])
        out = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            g = gate(x).softmax(dim=1).t().unsqueeze(2).expand(-1, -1, 7)
            out.append(tower(torch.sum(g * experts, dim=0)).squeeze(-1))
        return out


def _tasks(model: Any, b: Any) -> Tensor:
    loss: Any = 0
    for i, (y, wanted) in enumerate(zip(model(b["dense"]), (b["label"], b["second"]), strict=True)):
        precision = torch.exp(-model.log_vars[i])
        loss += precision * F.binary_cross_entropy_with_logits(y, wanted) + model.log_vars[i]
    return loss


def multi_gate_experts() -> Job:
    return job_of(MMoE, _tasks, CLICKS)


class MultVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.q2, self.p, self.p2 = (
            nn.Linear(13, 9),
            nn.Linear(9, 10),
            nn.Linear(5, 9),
            nn.Linear(9, 13),
        )
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(F.normalize(x))
        mu, logvar = self.q2(torch.tanh(self.q(h))).split(5, dim=1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar) if self.training else mu
        kl = -0.5 * torch.mean(torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1))
        return self.p2(torch.tanh(self.p(z))), kl


def _multinomial(model: Any, b: Any) -> Tensor:
    x = torch.zeros(b["history"].size(0), 13, dtype=b["dense"].dtype)
    x.scatter_(1, b["history"], 1.0)
    logits, kl = model(x)
    return -(F.log_softmax(logits, 1) * x).sum(1).mean() + 0.2 * kl


def multinomial_vae() -> Job:
    return job_of(MultVAE, _multinomial, CLICKS, optimizer=adam)


class SparseTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, 5, sparse=True) for size in SIZES])
        self.head = nn.Linear(5 * FIELDS, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        return self.head(torch.cat([t(sparse[:, i]) for i, t in enumerate(self.tables)], 1)).squeeze(1)


def sparse_gradients() -> Job:
    return job_of(
        SparseTables, _click, CLICKS, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )


class BagOfBehaviours(nn.Module):
    """A bag of items as many as each user has, by offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(13, 7, mode="mean"), nn.Linear(7, 1)

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        values = torch.cat([row[:n] for row, n in zip(history, lengths.tolist(), strict=True)])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        return self.head(self.bag(values, offsets)).squeeze(1)


def bag_with_offsets() -> Job:
    loss = lambda m, b: F.binary_cross_entropy_with_logits(m(b["history"], b["history_len"]), b["label"])  # noqa: E731
    return job_of(BagOfBehaviours, loss, CLICKS)

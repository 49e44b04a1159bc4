"""Language: positions, masks and caches that are made as they are needed, experts that drop tokens, heads that share and heads that are many."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, uniform

VOCABULARY, LENGTH, WIDTH, HEADS = 23, 8, 12, 3
TEXT = {"ids": integers(511, VOCABULARY, LENGTH + 1, least=1)}
LENGTHS = integers(512, LENGTH + 2, least=4)
PADDED = {"ids": TEXT["ids"] * (torch.arange(LENGTH + 1) < LENGTHS[:, None]), "lengths": LENGTHS}


def next_token(model: Any, b: Any) -> Tensor:
    ids = b["ids"]
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Queries, keys, values by heads; what is added to scores comes from outside."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(self.size) + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.n1, self.n2, self.mixer = RMSNorm(WIDTH), RMSNorm(WIDTH), mixer
        self.gate, self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = x + self.mixer(self.n1(x), *args)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(self.mixer(i)) for i in range(2)])
        self.norm, self.head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def mixer(self, index: int) -> nn.Module:
        return Attention()

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        bias = torch.full((ids.size(1), ids.size(1)), -math.inf).triu(1).to(x)
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def _slopes(heads: int) -> list[float]:
    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + _slopes(2 * closest)[0::2][: heads - closest]


class Alibi(Decoder):
    """Slopes of ALiBi in a buffer that is enlarged on demand; a window of four for every other layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", self.build(4), persistent=False)

    @staticmethod
    def build(length: int) -> Tensor:
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        bias = torch.tensor(_slopes(HEADS)).view(HEADS, 1, 1) * distance
        return bias.masked_fill(distance > 0, float("-inf"))

    def hidden(self, ids: Tensor) -> Tensor:
        x, t = self.embed(ids), ids.size(1)
        if self.bias.size(-1) < t:
            self.bias = self.build(t).to(self.bias)
        bias = self.bias[:, :t, :t]
        near = torch.ones(t, t, dtype=torch.bool).tril().triu(-3)
        for i, block in enumerate(self.blocks):
            x = block(x, bias if i % 2 == 0 else bias.masked_fill(~near, -1e9))
        return self.norm(x)


def alibi_with_windows() -> Job:
    return job_of(Alibi, next_token, TEXT)


class Rotary(nn.Module):
    """Cosines and sines kept for the longest text so far."""

    def __init__(self, size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, size, 2) / size), persistent=False)
        self.seq_len_cached, self.cos_cached, self.sin_cached = 0, None, None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.size(-2) > self.seq_len_cached or self.cos_cached is None or self.cos_cached.dtype != x.dtype:
            self.seq_len_cached = x.size(-2)
            freqs = torch.outer(torch.arange(x.size(-2)).to(self.inv_freq), self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1).to(x.dtype)
            self.cos_cached, self.sin_cached = emb.cos()[None, None], emb.sin()[None, None]
        return self.cos_cached[:, :, : x.size(-2)], self.sin_cached[:, :, : x.size(-2)]


def _rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class RotaryAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.q_norm, self.k_norm = Rotary(self.size), RMSNorm(self.size), RMSNorm(self.size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            self.q_norm(self.split(self.q(x))),
            self.k_norm(self.split(self.k(x))),
            self.split(self.v(x)),
        )
        cos, sin = self.rotary(q)
        q, k = q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class RotaryDecoder(Decoder):
    def mixer(self, index: int) -> nn.Module:
        return RotaryAttention()

    def forward(self, ids: Tensor) -> Tensor:
        return 7.0 * torch.tanh(self.head(self.hidden(ids)) / 7.0)


def rotary_tables_on_demand() -> Job:
    return job_of(RotaryDecoder, next_token, TEXT)


class SharedKeys(Decoder):
    """Later layers read the keys and values of the first (YOCO, Gemma 3n)."""

    class Reader(nn.Module):
        def __init__(self, owner: bool) -> None:
            super().__init__()
            self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.kv = nn.Linear(WIDTH, 2 * 4) if owner else None

        def forward(self, x: Tensor, store: dict[str, Tensor], bias: Tensor) -> Tensor:
            if self.kv is not None:
                store["k"], store["v"] = self.kv(x).chunk(2, -1)
            q = self.q(x).unflatten(-1, (HEADS, 4))
            scores = torch.einsum("bihd,bjd->bhij", q, store["k"]) / 2 + bias
            return self.out(torch.einsum("bhij,bjd->bihd", scores.softmax(-1), store["v"]).flatten(2))

    def mixer(self, index: int) -> nn.Module:
        return self.Reader(index == 0)

    def hidden(self, ids: Tensor) -> Tensor:
        x, store = self.embed(ids), {}
        bias = torch.full((ids.size(1), ids.size(1)), -math.inf).triu(1).to(x)
        for block in self.blocks:
            x = block(x, store, bias)
        return self.norm(x)


def keys_shared_by_layers() -> Job:
    return job_of(SharedKeys, next_token, TEXT)


class BigBird(Decoder):
    """Global tokens where the text has separators, random blocks drawn once, a window: a mask by value."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("random_blocks", torch.randint(0, 4, (4, 1), generator=generator))

    def mask(self, ids: Tensor) -> Tensor:
        t = ids.size(1)
        position = torch.arange(t)
        window = (position[:, None] - position[None]).abs() <= 1
        blocks = torch.zeros(4, 4, dtype=torch.bool).scatter(1, self.random_blocks, True)
        random = blocks.repeat_interleave(t // 4, 0).repeat_interleave(t // 4, 1)
        separators = (ids == 7) | (ids % 5 == 1)
        seen = (window | random)[None] | separators[:, :, None] | separators[:, None, :]
        return seen & (position[:, None] >= position[None])

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        bias = torch.where(self.mask(ids), 0.0, torch.finfo(x.dtype).min).to(x)[:, None]
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)


def sparse_masks_by_value() -> Job:
    return job_of(BigBird, next_token, TEXT)


class Packed(Decoder):
    """Texts in one row, told apart by separators: positions that start again, blocks on the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def hidden(self, ids: Tensor) -> Tensor:
        t = ids.size(1)
        start = F.pad(ids[:, :-1] % 4 == 0, (1, 0), value=True)
        segment = start.long().cumsum(-1)
        index = torch.arange(t).expand_as(ids)
        begin = torch.where(start, index, 0).cummax(-1).values
        x = self.embed(ids) + self.positions(index - begin)
        same = segment[:, None, :, None] == segment[:, None, None, :]
        bias = torch.zeros_like(same, dtype=x.dtype).masked_fill(
            ~(same & torch.ones(t, t, dtype=torch.bool).tril()), -1e30
        )
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)


def packed_by_segments() -> Job:
    return job_of(Packed, next_token, TEXT)


class Mixture(nn.Module):
    """A mixture of softmaxes over a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.parts = Decoder(), 3
        self.prior, self.latent = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.lm.hidden(ids)
        latent = torch.tanh(self.latent(h)).view(-1, WIDTH)
        probabilities = F.linear(latent, self.lm.embed.weight).softmax(-1).view(*h.shape[:2], self.parts, -1)
        prior = self.prior(h).softmax(-1)
        return (probabilities * prior.unsqueeze(-1)).sum(2).add(1e-8).log()


def mixture_of_softmaxes() -> Job:
    return job_of(
        Mixture, lambda m, b: F.nll_loss(m(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten()), TEXT
    )


def _sampled_softmax(model: Any, b: Any) -> Tensor:
    """Logits of the target and of drawn negatives, corrected by how likely each was to be drawn; hits are hidden."""
    h, target = model.hidden(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten()
    frequency = 1.0 / torch.arange(2, VOCABULARY + 2).to(h)
    frequency = frequency / frequency.sum()
    negatives = torch.multinomial(frequency, 6, replacement=False)
    table = model.head.weight
    positive = (h * table[target]).sum(-1) - frequency[target].log()
    negative = h @ table[negatives].T - frequency[negatives].log()
    negative = negative.masked_fill(target[:, None] == negatives[None], -1e9)
    return F.cross_entropy(torch.cat([positive[:, None], negative], 1), torch.zeros_like(target))


def sampled_softmax() -> Job:
    return job_of(Decoder, _sampled_softmax, TEXT)


class MultiToken(nn.Module):
    """Heads for the tokens after the next, each with a block of its own (multi-token prediction, Medusa)."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = Decoder()
        self.extra = nn.ModuleList(
            [
                nn.ModuleDict({"proj": nn.Linear(2 * WIDTH, WIDTH), "block": Block(Attention())})
                for _ in range(2)
            ]
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.lm.hidden(ids[:, :-1])
        losses = [F.cross_entropy(self.lm.head(h).transpose(1, 2), ids[:, 1:])]
        for depth, each in enumerate(self.extra, start=1):
            later = self.lm.embed(ids[:, depth:-1])
            h = each["proj"](torch.cat([self.lm.norm(h[:, :-1]), self.lm.norm(later)], -1))
            h = each["block"](h, torch.full((h.size(1), h.size(1)), -math.inf).triu(1).to(h))
            losses.append(0.3 / depth * F.cross_entropy(self.lm.head(h).transpose(1, 2), ids[:, depth + 1 :]))
        return torch.stack(losses).sum()


def heads_for_later_tokens() -> Job:
    return job_of(MultiToken, lambda m, b: m(b["ids"]), TEXT)


class HyperConnected(Decoder):
    """Three residual streams, mixed by weights that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.ParameterList([torch.eye(3)[i % 3] for i in range(2)])
        self.write = nn.ParameterList([torch.ones(3) for _ in range(2)])
        self.mix = nn.ParameterList([torch.eye(3) for _ in range(2)])
        self.dynamic = nn.ModuleList([nn.Linear(WIDTH, 3, bias=False) for _ in range(2)])

    def hidden(self, ids: Tensor) -> Tensor:
        streams = self.embed(ids).unsqueeze(-2).repeat(1, 1, 3, 1)
        bias = torch.full((ids.size(1), ids.size(1)), -math.inf).triu(1).to(streams)
        for i, block in enumerate(self.blocks):
            weights = self.read[i] + 0.1 * torch.tanh(
                self.dynamic[i](F.layer_norm(streams.mean(-2), (WIDTH,)))
            )
            x = torch.einsum("btnc,btn->btc", streams, weights)
            y = block(x, bias) - x
            streams = (
                torch.einsum("btnc,nm->btmc", streams, self.mix[i]) + y.unsqueeze(-2) * self.write[i][:, None]
            )
        return self.norm(streams.sum(-2))


def hyper_connections() -> Job:
    return job_of(HyperConnected, next_token, TEXT)


class ZeroGated(nn.Module):
    """Prefixes of keys and values behind a gate that starts at zero, in a frozen model (LLaMA-Adapter)."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = Decoder().requires_grad_(False)
        self.prompt, self.gate = (
            nn.Parameter(torch.randn(2, 3, WIDTH) * 0.3),
            nn.Parameter(torch.zeros(2, HEADS, 1, 1) + 0.1),
        )
        self.ia3 = nn.ParameterDict({"k": torch.ones(WIDTH), "v": torch.ones(WIDTH)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lm.embed(ids)
        bias = torch.full((ids.size(1), ids.size(1)), -math.inf).triu(1).to(x)
        for i, block in enumerate(self.lm.blocks):
            a, h = block.mixer, block.n1(x)
            q, k, v = a.split(a.q(h)), a.split(a.k(h) * self.ia3["k"]), a.split(a.v(h) * self.ia3["v"])
            prompt = self.prompt[i].unsqueeze(0).expand(ids.size(0), -1, -1)
            pk, pv = a.split(a.k(prompt)), a.split(a.v(prompt))
            scores = torch.cat([q @ pk.mT, q @ k.mT + bias], -1) / math.sqrt(a.size)
            weights = torch.cat(
                [scores[..., :3].softmax(-1) * self.gate[i].tanh(), scores[..., 3:].softmax(-1)], -1
            )
            x = x + a.out((weights @ torch.cat([pv, v], 2)).transpose(1, 2).flatten(2))
            h = block.n2(x)
            x = x + block.down(F.silu(block.gate(h)) * block.up(h))
        return self.lm.head(self.lm.norm(x))


def zero_gated_prefixes() -> Job:
    return job_of(ZeroGated, next_token, TEXT)


def _padded_with_unlikelihood(model: Any, b: Any) -> Tensor:
    """Tokens that came before are made less likely, where the text is no padding; mean by the tokens of each text."""
    ids = b["ids"]
    logp = model(ids[:, :-1]).log_softmax(-1)
    target, t = ids[:, 1:], ids.size(1) - 1
    valid = torch.arange(1, t + 1)[None] < b["lengths"][:, None]
    nll = -logp.gather(-1, target.unsqueeze(-1)).squeeze(-1) * valid
    before = target.unsqueeze(1).expand(-1, t, -1).tril(-1)
    before = before.masked_fill(before == target.unsqueeze(2), 0)
    unlikely = torch.zeros_like(logp).scatter_(-1, before, 1.0)
    unlikely[..., 0] = 0
    penalty = -(torch.clamp(1.0 - logp.exp(), min=1e-5).log() * unlikely).sum(-1) * valid
    return ((nll + 0.2 * penalty).sum(-1) / valid.sum(-1)).mean()


def unlikelihood_of_padded_texts() -> Job:
    return job_of(Decoder, _padded_with_unlikelihood, PADDED)


class Confident(Decoder):
    """A head at each depth; texts that are sure enough keep what they had (early exit as BERxiT and CALM)."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        bias = torch.full((ids.size(1), ids.size(1)), -math.inf).triu(1).to(x)
        done = torch.zeros(ids.size(0), dtype=torch.bool)
        result = x.new_zeros(*ids.shape, VOCABULARY)
        for block, leave in zip(self.blocks, self.exits, strict=True):
            rows = (~done).nonzero().squeeze(1)
            if rows.numel() == 0:
                break
            h = block(x[rows], bias)
            x = x.index_copy(0, rows, h)
            logits = leave(h)
            result = result.index_put((rows,), logits)
            done[rows] = logits.softmax(-1).amax(-1).mean(-1) > 0.08
        return result


def exits_of_texts_that_are_sure() -> Job:
    return job_of(Confident, next_token, TEXT)


def _preferred(model: Any, b: Any) -> Tensor:
    """Rewards of pairs with a margin, and the KL to a frozen copy (reward model with reference)."""
    if not hasattr(model, "reference"):
        raise AttributeError("the model has no reference")
    logp, ref = (
        model(b["ids"][:, :-1]).log_softmax(-1),
        model.reference(b["ids"][:, :-1]).log_softmax(-1).detach(),
    )
    target = b["ids"][:, 1:].unsqueeze(-1)
    margin = (logp.gather(-1, target) - ref.gather(-1, target)).squeeze(-1).sum(-1)
    half = b["weight"] > 0.5
    kl = (logp.exp() * (logp - ref)).sum(-1).mean(-1)
    return torch.where(
        half, 1 - torch.sigmoid(margin - kl.mean().detach()), 1 - torch.sigmoid(kl.mean().detach() - margin)
    ).mean()


class WithReference(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.reference = Decoder().eval().requires_grad_(False)

    def train(self, mode: bool = True) -> WithReference:
        super().train(mode)
        self.reference.eval()
        return self


def preferences_without_pairs() -> Job:
    return job_of(WithReference, _preferred, {**TEXT, "weight": uniform(513)})

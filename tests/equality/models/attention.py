"""Models with attention: causal and not, packed and separate projections, many kinds of heads and positions, a real length."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, whole
from tests.equality.models.dense import RMSNorm, classify


class Block(nn.Module):
    """[batch, length, width] -> the same: causal attention with packed projections, and a feed-forward."""

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float = 0.0, causal: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)  # fmt: skip
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, hidden: int, length: int, dropout: float = 0.0, layers: int = 2
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tied_gpt() -> GPT:
    """The embedding is the output projection; dropout."""
    model = GPT(29, 15, 3, 31, 7, dropout=0.1)
    model.head.weight = model.embed.weight
    nn.init.normal_(model.embed.weight, std=0.3)
    return model


def square_gpt() -> GPT:
    """Heads = head size = length = batch = 4, hidden = vocabulary = 16 = width."""
    return GPT(16, 16, 4, 16, 4)


def long_gpt() -> GPT:
    """Length 1,024."""
    return GPT(19, 6, 2, 8, 1024, layers=1)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of [batch, heads, length, size]."""
    half = x.shape[-1] // 2
    rates = 1.0 / 100.0 ** (torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), rates)
    one, other = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class GroupedBlock(nn.Module):
    """As in Llama: fewer heads of keys than of queries, rotary positions, RMS norms, a packed gate."""

    def __init__(self, width: int, heads: int, groups: int, size: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.norm, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, heads * size, bias=False)
        self.kv = nn.Linear(width, 2 * groups * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        k, v = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (rotated(k), v))
        mixed = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Tokens [batch, 6] -> logits [batch, 6, 23]; 6 heads, 3 of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        self.layers = nn.ModuleList(GroupedBlock(12, 6, 3, 4, 11) for _ in range(2))
        self.norm = RMSNorm(12)
        self.head = nn.Linear(12, 23, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class OneKey(nn.Module):
    """Tokens [batch, 5] -> logits [batch, 5, 13]: 5 heads share one of keys; softmax and ALiBi by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.q = nn.Linear(10, 15, bias=False)
        self.k = nn.Linear(10, 3, bias=False)
        self.v = nn.Linear(10, 3, bias=False)
        self.out = nn.Linear(15, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 13)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 6).float())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q = self.q(x).unflatten(-1, (5, 3))
        scores = torch.einsum("blhd,bmd->bhlm", q, self.k(x)) / math.sqrt(3)
        places = torch.arange(tokens.shape[1])
        distance = places[:, None] - places[None, :]
        scores = scores - self.slopes[:, None, None] * distance
        weights = scores.masked_fill(distance < 0, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("bhlm,bmd->blhd", weights, self.v(x)).flatten(2)
        return self.head(self.norm(x + self.out(mixed)))


class Encoder(nn.Module):
    """Tokens [batch, 7] with padding -> [batch, 4], by torch's own layers, which have packed projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 9, padding_idx=0)
        layer = nn.TransformerEncoderLayer(9, 3, 14, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(9, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.layers(self.embed(tokens), src_key_padding_mask=padding)
        there = (~padding).unsqueeze(-1).to(x.dtype)
        return self.head((x * there).sum(1) / there.sum(1))


class Linear(nn.Module):
    """Tokens [batch, 6] -> logits [batch, 6, 11]: linear attention, whose state is a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 3 * 12)
        self.out = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (each.unflatten(-1, (3, 4)) for each in self.qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("blhd,blhe->blhde", k, v).cumsum(dim=1)
        mixed = torch.einsum("blhd,blhde->blhe", q, state)
        mixed = mixed / (torch.einsum("blhd,blhd->blh", q, k.cumsum(dim=1)).unsqueeze(-1) + 1e-6)
        return self.head(self.norm(x + self.out(mixed.flatten(2))))


class Perceiver(nn.Module):
    """[batch, 8] tokens -> [batch, 5]: latents attend to the input, then to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, 10)
        self.latents = nn.Parameter(torch.randn(3, 10))
        self.cross = nn.MultiheadAttention(10, 2, batch_first=True)
        self.self = nn.MultiheadAttention(10, 5, batch_first=True, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(10) for _ in range(2))
        self.head = nn.Linear(10, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.embed(tokens)
        x = self.latents.expand(tokens.shape[0], -1, -1)
        x = self.norms[0](x + self.cross(x, inputs, inputs, need_weights=False)[0])
        x = self.norms[1](x + self.self(x, x, x, need_weights=False)[0])
        return self.head(x.mean(dim=1))


class Relative(nn.Module):
    """Tokens [batch, 6] -> [batch, 5]: a learned bias for each distance and head, and windows rolled as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 12)
        self.biases = nn.Embedding(5, 3)
        self.qkv = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 5)
        places = torch.arange(3)
        self.register_buffer("distances", places[:, None] - places[None, :] + 2, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            rolled = torch.roll(x, -number, dims=1).unflatten(1, (2, 3))  # windows of 3
            q, k, v = (each.unflatten(-1, (3, 4)).transpose(2, 3) for each in qkv(rolled).chunk(3, dim=-1))
            scores = q @ k.transpose(-1, -2) / 2 + self.biases(self.distances).permute(2, 0, 1)
            mixed = (scores.softmax(dim=-1) @ v).transpose(2, 3).flatten(3).flatten(1, 2)
            x = x + torch.roll(out(mixed), number, dims=1)
        return self.head(x.amax(dim=1))


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum and number over the tokens that are there."""
    logits, there = model(batch["x"]), batch["y"] != -100
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=-100, reduction="sum")
    return loss, there.sum()


def texts(vocabulary: int, length: int, seed: int = 20) -> object:
    """x [length] tokens, y [length] the next ones, -100 behind the end of a text."""

    def build(count: int) -> Samples:
        tokens = whole(seed, vocabulary, count, length + 1)
        lengths = whole(seed + 100, length, count, 1) + 1
        return Samples(x=tokens[:, :-1], y=tokens[:, 1:].masked_fill(torch.arange(length) >= lengths, -100))

    return build


def padded(vocabulary: int, length: int, classes: int, seed: int = 21) -> object:
    """x [length] tokens, 0 behind the end, y a class."""

    def build(count: int) -> Samples:
        lengths = whole(seed + 100, length, count, 1) + 1
        tokens = whole(seed, vocabulary - 1, count, length) + 1
        return Samples(
            x=tokens.masked_fill(torch.arange(length) >= lengths, 0), y=whole(seed + 200, classes, count)
        )

    return build


ATTENTION = [
    Model(
        name="tied_gpt",
        interacts=True,
        features="tied ends, dropout, mean over tokens",
        build=tied_gpt,
        loss=next_token,
        samples=texts(29, 7),
        stages=2,
        cut="blocks.1",
    ),
    Model(
        name="square_gpt",
        features="heads, head size, length, batch equal; hidden = vocabulary",
        build=square_gpt,
        loss=next_token,
        samples=texts(16, 4),
        chunk=4,
        cut="blocks.1",
        pins="blocks.*.up:column+blocks.*.down:row",
    ),
    Model(
        name="long_gpt",
        features="length 1,024",
        build=long_gpt,
        loss=next_token,
        samples=texts(19, 1024),
        chunk=1,
        stages=2,
    ),
    Model(
        name="llama",
        features="grouped keys, rotary, packed gate",
        build=Llama,
        loss=next_token,
        samples=texts(23, 6),
        chunk=2,
        cut="layers.1",
    ),
    Model(
        name="one_key",
        features="uneven heads, one of keys, ALiBi",
        build=OneKey,
        loss=next_token,
        samples=texts(13, 5),
        stages=2,
    ),
    Model(
        name="encoder",
        interacts=True,
        features="torch's layers, padding masks, dropout",
        build=Encoder,
        loss=classify,
        samples=padded(17, 7, 4),
        cut="layers.layers.1",
    ),
    Model(
        name="linear_attention",
        features="running sums",
        build=Linear,
        loss=next_token,
        samples=texts(11, 6),
        stages=2,
    ),
    Model(
        name="perceiver",
        features="latents, cross attention",
        build=Perceiver,
        loss=classify,
        samples=padded(21, 8, 5),
        stages=2,
    ),
    Model(
        name="relative",
        features="relative biases, rolled windows",
        build=Relative,
        loss=classify,
        samples=padded(14, 6, 5),
        chunk=2,
        stages=2,
    ),
]

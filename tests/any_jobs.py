"""Small jobs for which divisions and cuts are drawn: name -> a function of its sizes' draw.

Sizes are drawn too: odd, or equal by accident (heads = head size, batch = length, hidden = vocabulary). A
step takes milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.core.objectives import Loss
from tests.jobs import Samples

NUM_SAMPLES = 12
Chance = random.Random
Build = Callable[[Chance], tuple[Callable[[], nn.Module], Callable[[Any, Any], Loss], Samples]]


def job_of(name: str, chance: Chance) -> Job:
    """A job of `SMALL`, or the long solver, with sizes drawn."""
    build, loss, samples = _solver(chance, 6) if name == "long solver" else SMALL[name](chance)
    steep = chance.random() < 0.5

    def optimizer(named: Any) -> torch.optim.Optimizer:
        parameters = [each for _, each in named]
        return (
            torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
            if steep
            else torch.optim.AdamW(parameters, lr=1e-3)
        )

    return Job(model=build, loss=loss, optimizer=optimizer, data=lambda: samples, batch_size=4, steps=2)


def _source(chance: Chance) -> torch.Generator:
    return torch.Generator().manual_seed(chance.randrange(2**31))


def _normal(chance: Chance, *shape: int) -> Tensor:
    return torch.randn(NUM_SAMPLES, *shape, generator=_source(chance))


def _numbers(chance: Chance, limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, (NUM_SAMPLES, *shape), generator=_source(chance))


def _next(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())


def _classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _square(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class _Grouped(nn.Module):
    """Attention with fewer key heads than query heads, its values read by another layer, too; a norm before,
    dropout after."""

    def __init__(
        self, width: int, heads: int, groups: int, size: int, *, beside: bool, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.size, self.norm = size, nn.RMSNorm(width)
        self.q, self.k, self.v = (
            nn.Linear(width, heads * size),
            nn.Linear(width, groups * size, bias=False),
            nn.Linear(width, groups * size),
        )
        self.out, self.dropout = nn.Linear(heads * size, width), nn.Dropout(dropout)
        self.g = nn.Linear(groups * size, 2 * width + 1) if beside else None
        self.u = nn.Linear(2 * width + 1, width) if beside else None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        values = self.v(normed)
        q, k, v = (
            each.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.q(normed), self.k(normed), values)
        )
        found = self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )
        if self.g is not None and self.u is not None:
            found = found + self.u(torch.tanh(self.g(values)))
        return x + self.dropout(found)


class _Decoder(nn.Module):
    """Tokens -> logits; the embedding is the head, too, if `tied`; positions are looked up."""

    def __init__(
        self, vocabulary: int, width: int, length: int, blocks: list[nn.Module], *, tied: bool
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _grouped(chance: Chance) -> Any:
    groups = chance.choice([1, 2, 3])
    heads, size, length = groups * chance.choice([2, 3]), chance.choice([2, 3, 5]), chance.choice([4, 5, 7])
    vocabulary, width, tied, beside = (
        chance.choice([11, 13, 15]),
        chance.choice([9, 12, 15]),
        chance.random() < 0.5,
        chance.random() < 0.6,
    )
    blocks = chance.choice([1, 2])
    return (
        lambda: _Decoder(
            vocabulary,
            width,
            length,
            [_Grouped(width, heads, groups, size, beside=beside) for _ in range(blocks)],
            tied=tied,
        ),
        _next,
        Samples(x=_numbers(chance, vocabulary, length + 1)),
    )


class _Packed(nn.Module):
    """q, k and v in one matrix, heads taken out by `chunk`; gated units over halves of an odd width."""

    def __init__(self, heads: int, size: int, wide: int) -> None:
        super().__init__()
        width = heads * size
        self.heads, self.norm, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, value = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def _packed(chance: Chance) -> Any:
    heads, size, wide = chance.choice([2, 3, 5]), chance.choice([2, 3, 5]), chance.choice([7, 11, 12])
    vocabulary, length = chance.choice([heads * size, 17]), chance.choice([5, 6])
    return (
        lambda: _Decoder(
            vocabulary, heads * size, length, [_Packed(heads, size, wide) for _ in range(2)], tied=True
        ),
        _next,
        Samples(x=_numbers(chance, vocabulary, length + 1)),
    )


class _Gated(nn.Module):
    """Gated linear units over halves of odd sizes, as `F.glu`, as `split` into unequal parts, and along a dim
    that is not the last."""

    def __init__(self, width: int, half: int) -> None:
        super().__init__()
        self.half = half
        self.first, self.second, self.third = (
            nn.Linear(width, 2 * half),
            nn.Linear(half, 3 * half),
            nn.Linear(2 * half, width),
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.first(x), -1)
        small, large = self.second(y).split([self.half, 2 * self.half], -1)
        y = self.third(large * torch.cat([small, torch.sigmoid(small)], -1))
        return self.head(self.norm(x + y)).mean(1)


def _gated(chance: Chance) -> Any:
    width, half, length = chance.choice([7, 8, 9]), chance.choice([5, 7, 9]), chance.choice([3, 5])
    return (
        lambda: _Gated(width, half),
        _classes,
        Samples(x=_normal(chance, length, width), y=_numbers(chance, 4)),
    )


class _Convolutions(nn.Module):
    """Grouped, depthwise, strided and dilated convolutions with norms of a batch and of groups, a shortcut
    and a mean over the picture."""

    def __init__(self, groups: int, per_group: int, classes: int) -> None:
        super().__init__()
        channels = groups * per_group
        self.first, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.grouped = nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=groups)
        self.depthwise = nn.Conv2d(
            2 * channels, 2 * channels, 3, stride=2, padding=1, groups=2 * channels, bias=False
        )
        self.group_norm = nn.GroupNorm(groups, 2 * channels)
        self.shortcut = nn.Conv2d(channels, 2 * channels, 1, stride=2)
        self.last, self.head = (
            nn.Conv2d(2 * channels, channels + 1, 3, padding=2, dilation=2),
            nn.Linear(channels + 1, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.silu(self.group_norm(self.depthwise(self.grouped(x))) + self.shortcut(x))
        return self.head(F.relu(self.last(x)).mean((2, 3)))


def _convolutions(chance: Chance) -> Any:
    groups, per_group, classes = chance.choice([2, 3, 4]), chance.choice([2, 3]), chance.choice([3, 5])
    return (
        lambda: _Convolutions(groups, per_group, classes),
        _classes,
        Samples(x=_normal(chance, 3, 6, chance.choice([5, 6])), y=_numbers(chance, classes)),
    )


class _Skips(nn.Module):
    """Down by strides and up by transposed convolutions, with what was there before put beside it; a second
    result of the middle."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.down, self.deep = (
            nn.Conv1d(2, channels, 3, padding=1),
            nn.Conv1d(channels, 2 * channels, 2, 2),
            nn.Conv1d(2 * channels, 7, 1),
        )
        self.up, self.last = nn.ConvTranspose1d(7, channels, 2, 2), nn.Conv1d(2 * channels, 3, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.relu(self.first(x))
        deep = torch.tanh(self.norm(self.deep(torch.relu(self.down(first)))))
        return self.last(torch.cat([self.up(deep), first], 1)), self.middle(deep.amax(2))


def _skips(chance: Chance) -> Any:
    channels, length = chance.choice([3, 4, 5]), chance.choice([6, 8])

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found, middle = model(batch["x"])
        return F.cross_entropy(found, batch["y"]) + 0.3 * F.cross_entropy(middle, batch["y"][:, 0])

    return (
        lambda: _Skips(channels),
        loss,
        Samples(x=_normal(chance, 2, length), y=_numbers(chance, 3, length)),
    )


class _Tables(nn.Module):
    """Tables of categories, one of them used for two columns, a bag, and all pairs of vectors multiplied."""

    def __init__(self, sizes: list[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.bag = nn.EmbeddingBag(sizes[0], width, mode="sum")
        self.dense, self.top = (
            nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, width)),
            nn.Linear(width + 15, 1),
        )

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.dense(numbers)
        columns = [self.tables[column % len(self.tables)](categories[:, column]) for column in range(4)]
        vectors = torch.stack([dense, self.bag(categories), *columns], 1)
        row, column = torch.tril_indices(6, 6, -1)
        return self.top(torch.cat([dense, (vectors @ vectors.mT)[:, row, column]], 1)).squeeze(1)


def _tables(chance: Chance) -> Any:
    sizes, width = [chance.choice([5, 7, 11]) for _ in range(3)], chance.choice([4, 5, 7])

    def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = model(batch["x"], batch["c"])
        return F.binary_cross_entropy_with_logits(found, batch["y"], reduction="sum"), torch.tensor(
            float(len(found))
        )

    return (
        lambda: _Tables(sizes, width),
        loss,
        Samples(x=_normal(chance, 4), c=_numbers(chance, min(sizes), 4), y=_numbers(chance, 2).float()),
    )


class _Experts(nn.Module):
    """Two of several experts read each row: by looking up each row's matrices; beside them one that reads
    all, and a loss for balance."""

    def __init__(self, width: int, hidden: int, experts: int, *, dense: bool) -> None:
        super().__init__()
        self.dense, self.router = dense, nn.Linear(width, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, *sizes) * 0.3) for sizes in ((hidden, width), (width, hidden))
        )
        self.bias, self.shared = nn.Parameter(torch.randn(experts, hidden) * 0.1), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        best, ids = shares.topk(2, -1)
        if self.dense:
            hidden = torch.relu(torch.einsum("bsw,ehw->bseh", x, self.up) + self.bias)
            outputs = torch.einsum("bseh,ewh->bsew", hidden, self.down)
            weights = torch.zeros_like(shares).scatter(-1, ids, best)
            mixed = (outputs * weights[..., None]).sum(-2)
        else:
            rows, chosen = x.flatten(0, 1).repeat_interleave(2, 0), ids.flatten()
            hidden = torch.relu(torch.bmm(self.up[chosen], rows[..., None]).squeeze(-1) + self.bias[chosen])
            outputs = torch.bmm(self.down[chosen], hidden[..., None]).squeeze(-1)
            mixed = (outputs * best.flatten()[:, None]).view(*x.shape[:2], 2, -1).sum(2)
        balance = (shares.mean((0, 1)) * F.one_hot(ids, shares.shape[-1]).to(x.dtype).mean((0, 1, 2))).sum()
        return self.head(x + mixed + self.shared(x)).mean(1), balance


def _experts(chance: Chance) -> Any:
    width, hidden, experts, dense = (
        chance.choice([5, 7, 8]),
        chance.choice([5, 8, 11]),
        chance.choice([3, 4, 5]),
        chance.random() < 0.4,
    )

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, balance = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]) + 0.1 * balance

    return (
        lambda: _Experts(width, hidden, experts, dense=dense),
        loss,
        Samples(x=_normal(chance, chance.choice([3, 4]), width), y=_numbers(chance, 3)),
    )


class _Recurrent(nn.Module):
    """An LSTM, a GRU that goes both ways, then a cell in a loop from a learned state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm, self.gru = (
            nn.LSTM(width, hidden, batch_first=True),
            nn.GRU(hidden, 3, batch_first=True, bidirectional=True),
        )
        self.cell, self.start, self.head = (
            nn.GRUCell(6, hidden),
            nn.Parameter(torch.zeros(hidden)),
            nn.Linear(hidden, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(self.lstm(x)[0])[0]
        state = self.start.expand(len(x), -1)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def _recurrent(chance: Chance) -> Any:
    width, hidden = chance.choice([3, 5]), chance.choice([4, 5, 7])
    return (
        lambda: _Recurrent(width, hidden),
        _classes,
        Samples(x=_normal(chance, chance.choice([3, 4]), width), y=_numbers(chance, 4)),
    )


class _Translator(nn.Module):
    """torch's own encoder-decoder over one table, which is the head, too."""

    def __init__(self, heads: int, size: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, heads * size)
        self.layers = nn.Transformer(heads * size, heads, 1, 1, 11, 0.1, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        return F.linear(
            self.layers(self.embed(x), self.embed(y), tgt_mask=later, tgt_is_causal=True), self.embed.weight
        )


def _translator(chance: Chance) -> Any:
    heads, size, vocabulary = chance.choice([2, 3]), chance.choice([2, 3, 4]), chance.choice([9, 13])

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found = model(batch["x"], batch["y"])
        return F.cross_entropy(found.flatten(0, 1), batch["y"].roll(-1, 1).flatten(), label_smoothing=0.1)

    length = chance.choice([3, 5])
    return (
        lambda: _Translator(heads, size, vocabulary),
        loss,
        Samples(x=_numbers(chance, vocabulary, 5), y=_numbers(chance, vocabulary, length)),
    )


class _Solver(nn.Module):
    """Classical Runge-Kutta in fixed steps: one small network, used four times in each."""

    def __init__(self, width: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.steps, self.first, self.second = steps, nn.Linear(width + 1, hidden), nn.Linear(hidden, width)

    def slope(self, time: float, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.cat([x, torch.full_like(x[:, :1], time)], 1))))

    def forward(self, x: Tensor) -> Tensor:
        h = 1 / self.steps
        for step in range(self.steps):
            time = step * h
            a = self.slope(time, x)
            b = self.slope(time + h / 2, x + h / 2 * a)
            c = self.slope(time + h / 2, x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.slope(time + h, x + h * c))
        return x


def _solver(chance: Chance, steps: int = 2) -> Any:
    width, hidden = chance.choice([2, 3, 4]), chance.choice([5, 8, 16])

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    return (
        lambda: _Solver(width, hidden, steps),
        loss,
        Samples(x=_normal(chance, width), y=_normal(chance, width)),
    )


class _Teacher(nn.Module):
    """A frozen teacher, a detached goal, a mask of what was computed, numbers of the largest: values without
    gradient that later layers use."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(width, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, width),
        )
        self.teacher = nn.Sequential(
            nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)
        ).requires_grad_(False)
        self.table = nn.Embedding(hidden, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(x).softmax(-1) * self.scale
        y = torch.tanh(self.first(x))
        largest = y.argmax(-1)
        y = torch.tanh(self.second(y).masked_fill(y.detach() < 0, 0.1)) + y
        return (self.head(y) + self.table(largest) - goal) * y.detach().mean(-1, keepdim=True)


def _teacher(chance: Chance) -> Any:
    width, hidden = chance.choice([5, 6, 7]), chance.choice([6, 9, 11])
    return lambda: _Teacher(width, hidden), _square, Samples(x=_normal(chance, width))


class _Shared(nn.Module):
    """One block used several times, with norms of its own each time, and every earlier result added to the
    last."""

    def __init__(self, width: int, hidden: int, times: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norms, self.mix, self.head = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(times)),
            nn.Parameter(torch.ones(times)),
            nn.Linear(width, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for number, norm in enumerate(self.norms):
            x = x + self.mix[number] * self.down(F.gelu(self.up(norm(x))))
            found.append(x)
        return self.head(torch.stack(found, 1).mean(1))


def _shared(chance: Chance) -> Any:
    width, hidden, times = chance.choice([5, 6, 9]), chance.choice([6, 7, 12]), chance.choice([2, 3, 4])
    return (
        lambda: _Shared(width, hidden, times),
        _classes,
        Samples(x=_normal(chance, width), y=_numbers(chance, 3)),
    )


class _Graph(nn.Module):
    """Messages along edges: gathered where they start, added where they arrive."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.kinds, self.messages = (
            nn.Linear(width, hidden),
            nn.Embedding(3, hidden),
            nn.Linear(3 * hidden, hidden),
        )
        self.update, self.head = nn.GRUCell(hidden, hidden), nn.Linear(2 * hidden, 4)

    def forward(self, nodes: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        state = torch.tanh(self.embed(nodes))
        source, target = (edges[:, :, end, None].expand(-1, -1, state.shape[-1]) for end in (0, 1))
        for _ in range(2):
            sent = torch.cat([state.gather(1, source), state.gather(1, target), self.kinds(kinds)], 2)
            arrived = torch.zeros_like(state).scatter_add(1, target, torch.relu(self.messages(sent)))
            state = self.update(arrived.flatten(0, 1), state.flatten(0, 1)).view_as(state)
        return self.head(torch.cat([state.mean(1), state.amax(1)], 1))


def _graph(chance: Chance) -> Any:
    width, hidden, count = chance.choice([3, 5]), chance.choice([4, 6, 7]), chance.choice([5, 7])

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["e"], batch["k"]), batch["y"])

    samples = Samples(
        x=_normal(chance, count, width),
        e=_numbers(chance, count, 8, 2),
        k=_numbers(chance, 3, 8),
        y=_numbers(chance, 4),
    )
    return lambda: _Graph(width, hidden), loss, samples


class _Scan(nn.Module):
    """Attention without a softmax: sums of outer products along the sequence, decaying, and a short depthwise
    convolution before."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        width = heads * size
        self.heads, self.conv = heads, nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.qkv, self.gate, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, heads),
            nn.Linear(width, width),
        )
        self.decay = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        short = F.silu(self.conv(x.mT)[..., : x.shape[1]]).mT
        q, k, v = self.qkv(short).unflatten(-1, (3, self.heads, -1)).unbind(2)
        step = F.softplus(self.gate(x)) * -self.decay.exp()
        total = step.cumsum(1)
        weights = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
        later = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        scores = torch.einsum("bthd,bshd->btsh", q, k) * weights * later[..., None]
        return x + self.out(torch.einsum("btsh,bshd->bthd", scores, v).flatten(2))


def _scan(chance: Chance) -> Any:
    heads, size, length, vocabulary = (
        chance.choice([2, 3, 4]),
        chance.choice([2, 3, 4]),
        chance.choice([4, 5]),
        chance.choice([9, 12]),
    )
    return (
        lambda: _Decoder(vocabulary, heads * size, length, [_Scan(heads, size)], tied=False),
        _next,
        Samples(x=_numbers(chance, vocabulary, length + 1)),
    )


class _Autoencoder(nn.Module):
    """What is decoded is drawn around what was encoded; several results, and a loss of their sums."""

    def __init__(self, width: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encode, self.decode = (
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 2 * code)),
            nn.Linear(code, width),
        )
        self.weighed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        return self.weighed(self.decode(mean + torch.randn_like(mean) * spread.exp())), mean, spread


def _autoencoder(chance: Chance) -> Any:
    width, hidden, code = chance.choice([6, 7, 9]), chance.choice([6, 11]), chance.choice([3, 5])

    def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        again, mean, spread = model(batch["x"])
        surprise = (mean.square() + (2 * spread).exp() - 2 * spread).sum(1)
        return ((again - batch["x"]).square().sum(1) + 0.1 * surprise).sum(), len(mean)

    return lambda: _Autoencoder(width, hidden, code), loss, Samples(x=_normal(chance, width))


class _Mixer(nn.Module):
    """Matrices over places and over channels in turn; a table and norms of several dims."""

    def __init__(self, places: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.over_places = nn.Sequential(
            nn.Linear(places, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, places)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels)
        )
        self.norm, self.table, self.head = (
            nn.LayerNorm((places, channels)),
            nn.Parameter(torch.zeros(places, channels)),
            nn.Linear(channels, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.table)
        x = x + self.over_places(x.mT).mT
        return self.head(F.normalize(x + self.over_channels(x), dim=-1).amax(1))


def _mixer(chance: Chance) -> Any:
    places, channels, hidden = chance.choice([5, 6]), chance.choice([5, 6, 7]), chance.choice([6, 9])
    return (
        lambda: _Mixer(places, channels, hidden),
        _classes,
        Samples(x=_normal(chance, places, channels), y=_numbers(chance, 3)),
    )


class _Towers(nn.Module):
    """One encoder for two texts, a score for each of a batch's pairs, and a temperature."""

    def __init__(self, vocabulary: int, width: int, out: int) -> None:
        super().__init__()
        self.embed, self.conv, self.out = (
            nn.Embedding(vocabulary, width, padding_idx=0),
            nn.Conv1d(width, width + 2, 3, padding=1),
            nn.Linear(width + 2, out),
        )
        self.bilinear, self.scale = nn.Bilinear(out, out, 3), nn.Parameter(torch.tensor(0.5))

    def encode(self, x: Tensor) -> Tensor:
        return F.normalize(self.out(torch.relu(self.conv(self.embed(x).mT)).amax(2)), dim=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.encode(x), self.encode(y)
        return x @ y.T * self.scale.exp(), self.bilinear(x, y)


def _towers(chance: Chance) -> Any:
    vocabulary, width, out = chance.choice([9, 11]), chance.choice([5, 6]), chance.choice([3, 4, 5])

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        scores, kinds = model(batch["x"], batch["y"])
        goal = torch.arange(len(scores))
        return (
            F.cross_entropy(scores, goal)
            + F.cross_entropy(scores.T, goal)
            + F.cross_entropy(kinds, batch["k"])
        )

    samples = Samples(
        x=_numbers(chance, vocabulary, 5), y=_numbers(chance, vocabulary, 4), k=_numbers(chance, 3)
    )
    return lambda: _Towers(vocabulary, width, out), loss, samples


SMALL: dict[str, Build] = {
    "grouped": _grouped, "packed": _packed, "gated": _gated, "convolutions": _convolutions, "skips": _skips, "tables": _tables,
    "experts": _experts, "recurrent": _recurrent, "translator": _translator, "solver": _solver, "teacher": _teacher, "shared": _shared,
    "graph": _graph, "scan": _scan, "autoencoder": _autoencoder, "mixer": _mixer, "towers": _towers,
}  # fmt: skip

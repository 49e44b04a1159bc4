"""Models of one's own, written here: what no library has a class for, and a pair of models that must be
refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job_functions import Loss
from tests.families.family import NUM_SAMPLES, Family, family_of
from tests.families.samples import generator, pictures, pictures_in_parts, some_classes, words
from tests.jobs import Samples


def _own(
    name: str,
    notes: str,
    build: Callable[[float], nn.Module],
    samples: Callable[[], Samples],
    loss: Callable[..., Loss],
) -> Family:
    return family_of(name, "own", notes, build, loss, samples)


class _Recommender(nn.Module):
    """Numbers [batch, 5] and categories [batch, 3] -> logit [batch]: all pairs of their vectors
    multiplied."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 7) for size in (11, 5, 23))
        self.numbers = nn.Sequential(nn.Linear(5, 13), nn.ReLU(), nn.Linear(13, 7), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(7 + 6, 9), nn.ReLU(), nn.Dropout(dropout), nn.Linear(9, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.numbers(numbers)
        vectors = torch.stack(
            [dense, *(table(categories[:, column]) for column, table in enumerate(self.tables))], 1
        )
        row, column = torch.tril_indices(4, 4, -1, device=numbers.device)
        return self.top(torch.cat([dense, (vectors @ vectors.mT)[:, row, column]], 1)).squeeze(1)


def _visits() -> Samples:
    source = generator(61)
    columns = [torch.randint(size, (NUM_SAMPLES,), generator=source) for size in (11, 5, 23)]
    return Samples(
        numbers=torch.randn(NUM_SAMPLES, 5, generator=source),
        categories=torch.stack(columns, 1),
        clicked=some_classes(2).float(),
    )


def _click_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["numbers"], batch["categories"]), batch["clicked"])


class _UNet(nn.Module):
    """Pictures [batch, in, height, width] -> [batch, out, height, width]; down twice, up twice, with what was
    there put beside it."""

    def __init__(self, channels_in: int, channels_out: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.deep = (
            _convolutions(channels_in, 6),
            _convolutions(6, 9),
            _convolutions(9, 12),
        )
        self.dropout = nn.Dropout2d(dropout)
        self.up_deep, self.up_second = (
            nn.ConvTranspose2d(12, 9, 2, stride=2),
            nn.ConvTranspose2d(9, 6, 2, stride=2),
        )
        self.beside_second, self.beside_first = _convolutions(18, 9), _convolutions(12, 6)
        self.head = nn.Conv2d(6, channels_out, 1)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        deep = self.dropout(self.deep(F.max_pool2d(second, 2)))
        if shift is not None:
            deep = deep + shift[:, :, None, None]
        second = self.beside_second(torch.cat([_fit(self.up_deep(deep), second), second], 1))
        return self.head(self.beside_first(torch.cat([_fit(self.up_second(second), first), first], 1)))


def _convolutions(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(3, channels_out), nn.SiLU(), nn.Conv2d(channels_out, channels_out, 3, padding=1),
    )  # fmt: skip


def _fit(x: Tensor, like: Tensor) -> Tensor:
    """`x` padded to the height and width of `like`, which were odd."""
    return F.pad(x, (0, like.shape[3] - x.shape[3], 0, like.shape[2] - x.shape[2]))


def _pixel_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, labels = model(batch["pixel_values"]), batch["labels"]
    return F.cross_entropy(logits, labels, ignore_index=255, reduction="sum"), (labels != 255).sum()


class _Denoiser(nn.Module):
    """Pictures [batch, 3, height, width] and times [batch] -> the noise in them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = _UNet(3, 3, dropout)
        self.time = nn.Sequential(nn.Linear(8, 15), nn.SiLU(), nn.Linear(15, 12))
        self.register_buffer("kept", torch.linspace(0.99, 0.05, 20))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-torch.arange(4, device=x.device, dtype=x.dtype))
        return self.net(x, self.time(torch.cat([angles.sin(), angles.cos()], 1)))


def _denoising_loss(model: _Denoiser, batch: dict[str, Tensor]) -> Tensor:
    """Noise and times are drawn in the step."""
    clean = batch["pixel_values"]
    time = torch.randint(20, (len(clean),), device=clean.device)
    noise = torch.randn_like(clean)
    kept = model.kept[time][:, None, None, None]
    return F.mse_loss(model(kept.sqrt() * clean + (1 - kept).sqrt() * noise, time), noise)


class _Messages(nn.Module):
    """Nodes [batch, 9, 5], edges [batch, 14, 2], edge kinds [batch, 14] -> classes [batch, 4]; three rounds
    of messages, summed where they arrive."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.kinds = nn.Linear(5, 11), nn.Embedding(3, 11)
        self.messages = nn.ModuleList(nn.Linear(33, 11) for _ in range(3))
        self.update = nn.GRUCell(11, 11)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(22, 4)

    def forward(self, nodes: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        state = torch.tanh(self.embed(nodes))
        source, target = (edges[:, :, end, None].expand(-1, -1, 11) for end in (0, 1))
        for message in self.messages:
            sent = torch.cat([state.gather(1, source), state.gather(1, target), self.kinds(kinds)], 2)
            arrived = torch.zeros_like(state).scatter_add(1, target, torch.relu(message(sent)))
            state = self.update(arrived.flatten(0, 1), state.flatten(0, 1)).view_as(state)
        return self.head(self.dropout(torch.cat([state.mean(1), state.amax(1)], 1)))


def _graphs() -> Samples:
    source = generator(62)
    nodes = torch.randn(NUM_SAMPLES, 9, 5, generator=source)
    edges, kinds = (
        torch.randint(9, (NUM_SAMPLES, 14, 2), generator=source),
        torch.randint(3, (NUM_SAMPLES, 14), generator=source),
    )
    return Samples(nodes=nodes, edges=edges, kinds=kinds, labels=some_classes(4))


def _graph_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["nodes"], batch["edges"], batch["kinds"]), batch["labels"])


class _Autoencoder(nn.Module):
    """Pictures [batch, 3, 9, 7] -> pictures, means and logarithms of variances of what they were drawn
    from."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Flatten(), nn.Linear(189, 23), nn.ReLU(), nn.Dropout(dropout), nn.Linear(23, 2 * 5)
        )
        self.decode = nn.Sequential(
            nn.Linear(5, 23), nn.ReLU(), nn.Linear(23, 189), nn.Unflatten(1, (3, 9, 7))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(log_variance / 2)), mean, log_variance


def _evidence_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["pixel_values"]
    again, mean, log_variance = model(x)
    surprise = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return ((again - x).square().sum((1, 2, 3)) + surprise).mean()


class _Mixer(nn.Module):
    """Pictures [batch, 3, 15, 10] -> classes: MLPs over patches and over channels in turn."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 11, 5, stride=5)
        self.norms = nn.ModuleList(nn.LayerNorm(11) for _ in range(4))
        self.tokens = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Dropout(dropout), nn.Linear(13, 6))
            for _ in range(2)
        )
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(11, 17), nn.GELU(), nn.Dropout(dropout), nn.Linear(17, 11))
            for _ in range(2)
        )
        self.head = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for layer, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * layer](x).mT).mT
            x = x + channels(self.norms[2 * layer + 1](x))
        return self.head(x.mean(1))


class _TwoTowers(nn.Module):
    """Texts [batch, length] and [batch, length] -> vectors of length one, by one shared encoder."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 11, padding_idx=0)
        self.conv = nn.Conv1d(11, 13, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(13, 7)

    def encode(self, tokens: Tensor) -> Tensor:
        features = torch.relu(self.conv(self.embed(tokens).mT)).amax(2)
        return F.normalize(self.out(self.dropout(features)), dim=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode(x), self.encode(y)


def _pairs_of_texts() -> Samples:
    return Samples(x=words(63)[0], y=words(64, 5)[0], alike=some_classes(2) * 2 - 1)


def _distance_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cosine_embedding_loss(*model(batch["x"], batch["y"]), batch["alike"], margin=0.2)


class _Gan(nn.Module):
    """Draws pictures [batch, 3, 5, 5] from noise [batch, 4], and judges pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = nn.Sequential(nn.Linear(4, 19), nn.ReLU(), nn.Linear(19, 75), nn.Unflatten(1, (3, 5, 5)))
        self.judge = nn.Sequential(nn.Flatten(), nn.Linear(75, 13), nn.LeakyReLU(0.2), nn.Linear(13, 1))


def _two_losses(model: _Gan, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The one who draws wants another answer than the one who judges: two losses, each for its own optimizer
    step."""
    real = batch["pixel_values"]
    drawn = model.draw(torch.randn(len(real), 4, dtype=real.dtype, device=real.device))
    judged = F.softplus(-model.judge(real)).mean() + F.softplus(model.judge(drawn.detach())).mean()
    return F.softplus(-model.judge(drawn)).mean(), judged


OWN = [
    _own("recommendation", "tables of categories; all pairs of vectors multiplied", _Recommender, _visits, _click_loss),
    _own("u_net", "down and up with odd sizes; (sum, weight) over pixels", lambda rate: _UNet(3, 5, rate), lambda: pictures_in_parts(13, 11), _pixel_loss),
    _own("diffusion", "noise and times drawn in the loss", _Denoiser, lambda: Samples(pixel_values=pictures(11, 9)), _denoising_loss),
    _own("graph", "messages along the edges of graphs of fixed size", _Messages, _graphs, _graph_loss),
    _own("autoencoder", "a variational autoencoder: what is decoded is drawn", _Autoencoder, lambda: Samples(pixel_values=pictures(9, 7)), _evidence_loss),
    _own("mixer", "matrices over patches and over channels in turn", _Mixer,
         lambda: Samples(pixel_values=pictures(15, 10), labels=some_classes(5)),
         lambda model, batch: F.cross_entropy(model(batch["pixel_values"]), batch["labels"])),
    _own("two_towers", "one encoder used twice; distances of pairs", _TwoTowers, _pairs_of_texts, _distance_loss),
]  # fmt: skip
REFUSED = [
    family_of(
        "gan",
        "refused",
        "two losses that alternate",
        lambda rate: _Gan(),
        _two_losses,
        lambda: Samples(pixel_values=pictures(5, 5)),
    ),
]

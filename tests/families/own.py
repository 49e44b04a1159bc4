"""Models of one's own: what no library has a class for, some of them of the equality matrix, and a pair of models that must
be refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job_functions import Loss
from tests.equality.models.table import MODELS
from tests.families.family import NUM_SAMPLES, Family, family_of
from tests.families.samples import generator, pictures, some_classes
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


def _of_the_matrix(name: str, of: str) -> Family:
    """The model `of` of the equality matrix."""
    model = MODELS[of]
    return family_of(
        name,
        "own",
        model.features,
        lambda rate: model.build(),
        model.loss,
        lambda: model.samples(NUM_SAMPLES),
    )


OWN = [
    _own("recommendation", "tables of categories; all pairs of vectors multiplied", _Recommender, _visits, _click_loss),
    _own("mixer", "matrices over patches and over channels in turn", _Mixer,
         lambda: Samples(pixel_values=pictures(15, 10), labels=some_classes(5)),
         lambda model, batch: F.cross_entropy(model(batch["pixel_values"]), batch["labels"])),
    _of_the_matrix("u_net", "unet"),
    _of_the_matrix("diffusion", "diffusion"),
    _of_the_matrix("graph", "graph"),
    _of_the_matrix("autoencoder", "vae"),
    _of_the_matrix("two_towers", "triplets"),
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

"""Small jobs that the tests share: five models x four optimizers, deterministic, float32, a step in a few
milliseconds.

The default data has 30 samples and batches of 12, so that an epoch is 12, 12 and a short batch of 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.averaged import Averaged
from meshloom.core.job import Job, NamedParameters

MODELS = ["mlp", "cnn", "gpt", "unused_twice", "branch"]
OPTIMIZERS = ["sgd", "adamw", "adafactor", "muon"]


def make_job(model: str, optimizer: str, **overrides: Any) -> Job:
    """The job of a model in `MODELS` and an optimizer in `OPTIMIZERS`; `overrides` are fields of `Job`.

    sgd comes with clipping and a scheduler, adamw with a scheduler, gpt with a loss of (sum, weight).
    """
    build, loss, data = _MODELS[model]
    settings: dict[str, Any] = {
        "model": build,
        "loss": loss,
        "data": data,
        "batch_size": 12,
        "steps": 3,
        **_OPTIMIZERS[optimizer],
    }
    return Job(**{**settings, **overrides})


def averaged(job: Job, decay: float) -> Job:
    """With moving averages of its parameters."""
    function = job.optimizer

    def optimizer(named: NamedParameters) -> Any:
        made = function(named)
        return [Averaged(each, decay) for each in made] if isinstance(made, list) else Averaged(made, decay)

    return replace(job, optimizer=optimizer)


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that lie in memory: field name -> [samples, ...]."""

    def __init__(self, **fields: Tensor) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


def vectors(num_samples: int = 30) -> Samples:
    """x [7] normal, y a class of 5."""
    generator = torch.Generator().manual_seed(1)
    return Samples(
        x=torch.randn(num_samples, 7, generator=generator),
        y=torch.randint(5, (num_samples,), generator=generator),
    )


def images(num_samples: int = 30) -> Samples:
    """x [1, 6, 6] normal, y a class of 5."""
    generator = torch.Generator().manual_seed(2)
    return Samples(
        x=torch.randn(num_samples, 1, 6, 6, generator=generator),
        y=torch.randint(5, (num_samples,), generator=generator),
    )


def texts(num_samples: int = 30) -> Samples:
    """x [7] tokens of 29, y [7] the next tokens, -100 behind the end of the text; lengths 2 to 7."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(29, (num_samples, 8), generator=generator)
    lengths = torch.randint(2, 8, (num_samples, 1), generator=generator)
    return Samples(x=tokens[:, :-1], y=tokens[:, 1:].masked_fill(torch.arange(7) >= lengths, -100))


class MLP(nn.Module):
    """[batch, 7] -> [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class CNN(nn.Module):
    """[batch, 1, 6, 6] -> [batch, 5]; batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(6 * 4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(x)))
        x = F.silu(self.norm2(self.conv2(x)))
        return self.head(torch.tanh(self.hidden(self.dropout(F.avg_pool2d(x, 2).flatten(1)))))


class Block(nn.Module):
    """One transformer block, [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens [batch, length <= 7] -> logits [batch, length, 29]; the embedding is also the output
    projection."""

    def __init__(self, width: int = 15, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.position = nn.Embedding(7, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 3, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 29, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(
            self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UnusedTwice(nn.Module):
    """[batch, 7] -> [batch, 5]; `shared` is used twice, `unused` never, `frozen` has no gradient, `scale` is
    a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.shared = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 4)
        self.frozen = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.head(self.scale * self.frozen(torch.tanh(self.shared(x))))


class Branch(nn.Module):
    """[batch, 7] -> [batch, 5]; which of two layers runs depends on the data, so that a chunk may leave
    either unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.positive = nn.Linear(6, 6)
        self.negative = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.positive if bool(x.sum() > 0) else self.negative
        return self.head(torch.tanh(layer(torch.tanh(self.first(x)))))


def deciding_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What runs depends on values, outside of all modules."""
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    return loss * 2 if loss > 1 else loss


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes itself when it is given labels."""
    return model(**batch).loss


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the tokens that count, and how many those are."""
    total = F.cross_entropy(
        model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch["y"] != -100).sum()


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[], Samples]]] = {
    "mlp": (MLP, class_loss, vectors),
    "cnn": (CNN, class_loss, images),
    "gpt": (GPT, token_loss, texts),
    "unused_twice": (UnusedTwice, class_loss, vectors),
    "branch": (Branch, class_loss, vectors),
}


def _sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def _decay_groups(named: NamedParameters) -> list[dict[str, Any]]:
    return [
        {"params": [(name, each) for name, each in named if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [(name, each) for name, each in named if each.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_decay_groups(named), lr=3e-3)


def _adafactor(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(named, lr=1e-2)


def _muon(named: NamedParameters) -> list[torch.optim.Optimizer]:
    matrices = [
        (name, each) for name, each in named if each.ndim == 2 and "embed" not in name and "head" not in name
    ]
    taken = {name for name, _ in matrices}
    rest = [(name, each) for name, each in named if name not in taken]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def _halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": _sgd, "scheduler": _halving, "clip_grad_norm": 0.25},
    "adamw": {"optimizer": _adamw, "scheduler": _warmup},
    "adafactor": {"optimizer": _adafactor},
    "muon": {"optimizer": _muon},
}

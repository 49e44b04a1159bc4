"""Jobs whose training forward reads buffers that it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

from meshloom.core.buffer_rules import BufferRule, ema
from meshloom.core.job import Evaluate, Job
from tests.jobs import class_loss, vectors


class Spectral(nn.Module):
    """Spectral normalisation, as a parametrization or in its old form as a hook: u and v are improved by each
    forward, which reads them."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.head = norm(nn.Linear(7, 6)), norm(nn.Linear(6, 6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class MoCo(nn.Module):
    """A queue of keys that samples are contrasted with; a pointer says where the next keys go."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.features, self.head = nn.Linear(7, 8), nn.Linear(8, 4), nn.Linear(11, 5)
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("queue", F.normalize(torch.randn(4, 11, generator=generator), dim=0))
        self.register_buffer("labels", torch.randint(5, (11,), generator=generator))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.features(torch.tanh(self.body(x))), dim=1)
        out = self.head(keys @ self.queue.clone().detach() + 0.1 * self.labels)
        if self.training:
            with torch.no_grad():
                self.enqueue(keys)
        return out

    def enqueue(self, keys: Tensor) -> None:
        at = (self.pointer + torch.arange(len(keys), device=keys.device)) % 11
        self.queue.index_copy_(1, at, keys.T)
        self.labels.index_copy_(0, at, keys.argmax(1))
        self.pointer.copy_((self.pointer + len(keys)) % 11)


class Shifted(MoCo):
    """A queue without a pointer: new keys push the oldest out."""

    def enqueue(self, keys: Tensor) -> None:
        self.queue = torch.cat([keys.T, self.queue], 1)[:, :11]
        self.labels = torch.cat([keys.argmax(1), self.labels])[:11]


class DINO(nn.Module):
    """The teacher's outputs are centred by a moving average of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.teacher = (
            nn.Linear(7, 6),
            nn.Linear(6, 5),
            nn.Linear(7, 5).requires_grad_(False),
        )
        self.register_buffer("centre", torch.zeros(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        target = self.teacher(x).detach()
        out = self.head(torch.tanh(self.body(x))) * F.softmax((target - self.centre) / 0.5, dim=1)
        if self.training:
            self.centre = self.centre * 0.9 + target.mean(0, keepdim=True) * 0.1
        return out


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe, 2017): batch statistics corrected towards running ones, which the
    training forward reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) / self.std * self.weight + self.bias
        mean, std = x.mean(0), (x.var(0, unbiased=False) + 1e-3).sqrt()
        limit = 1 + self.calls.clamp(max=20) / 10
        r = torch.minimum(torch.maximum(std.detach() / self.std, 1 / limit), limit)
        d = torch.minimum(torch.maximum((mean.detach() - self.mean) / self.std, 1 - limit), limit - 1)
        out = ((x - mean) / std * r + d) * self.weight + self.bias
        with torch.no_grad():
            self.mean += 0.1 * (mean - self.mean)
            self.std += 0.1 * (std - self.std)
            self.calls += 1
        return out


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 6),
            BatchRenorm(6),
            nn.ReLU(),
            nn.Linear(6, 6),
            BatchRenorm(6),
            nn.ReLU(),
            nn.Linear(6, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Annealed(nn.Module):
    """How much of a residual counts grows with a counter; one layer runs twice in a forward, and its second
    run sees the first's count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.register_buffer("steps", torch.tensor(0))

    def block(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x + torch.tanh(self.second(x)) * (self.steps / 20).clamp(max=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(torch.tanh(self.first(x)))))


class Observed(nn.Module):
    """Scales by an average of the least and the greatest values, which are infinite until it has seen some, as
    observers of quantisation are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.register_buffer("least", torch.full((6,), torch.inf))
        self.register_buffer("greatest", torch.full((6,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            for seen, now in ((self.least, x.detach().amin(0)), (self.greatest, x.detach().amax(0))):
                seen.copy_(torch.where(seen.isinf(), now, seen + 0.1 * (now - seen)))
        return self.head(x / (1 + self.greatest - self.least))


def extreme(which: Callable[[Tensor], Tensor]) -> BufferRule:
    """The rule of what observers see."""
    return lambda before, left: which(torch.stack(list(left)))


# a model, and how the job declares what its chunks write
CASES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, BufferRule]]] = {
    "spectral norm": (lambda: Spectral(parametrizations.spectral_norm), {}),
    "spectral norm as a hook": (lambda: Spectral(spectral_norm), {}),
    "moco": (MoCo, {}),
    "shifted queue": (Shifted, {"queue": "last"}),
    "dino": (DINO, {"centre": ema(0.9)}),
    "batch renorm": (Renormed, {"*.calls": "sum", "layers.*": ema(0.9)}),
    "annealed": (Annealed, {"steps": "sum"}),
    "observed": (Observed, {"least": extreme(lambda x: x.amin(0)), "greatest": extreme(lambda x: x.amax(0))}),
}
# over 8 chunks: five of 2 samples, three of 1; batch renormalisation has variances of one sample, too
BATCH = 13


def job_of(case: str, **settings: Any) -> Job:
    """SGD with momentum; the same samples in the same order."""
    model, rules = CASES[case]
    known: dict[str, Any] = {
        "model": model, "loss": class_loss, "data": lambda: vectors(4 * BATCH), "batch_size": BATCH, "steps": 4, "shuffle": False,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), "seed": 3,
        "buffers": rules,
        "evaluate": Evaluate(data=lambda: vectors(11), metrics={"loss": class_loss}, every=1),
    }  # fmt: skip
    return Job(**{**known, **settings})

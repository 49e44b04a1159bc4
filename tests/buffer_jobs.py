"""Jobs whose training forward reads buffers that it writes, and a plain loop that trains them by the rule of
docs/contract.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

from meshloom.core.buffer_rules import BufferRule, ema
from meshloom.core.job import Evaluate, Job
from tests.jobs import Samples, class_loss, vectors

Buffers = Mapping[str, Tensor]
# (name, before the step, after each chunk) -> after the step
Merge = Callable[[str, Buffers, Sequence[Buffers]], Tensor]


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


def last(name: str, start: Buffers, ends: Sequence[Buffers]) -> Tensor:
    """Of all that a chunk writes."""
    return ends[-1][name]


def averaged(decay: float) -> Merge:
    """A moving average that each chunk moves once."""

    def merge(name: str, start: Buffers, ends: Sequence[Buffers]) -> Tensor:
        value = start[name]
        for end in ends:
            value = decay * value + (end[name] - decay * start[name])
        return value

    return merge


def counted(name: str, start: Buffers, ends: Sequence[Buffers]) -> Tensor:
    """A counter."""
    return start[name] + sum(end[name] - start[name] for end in ends)


def renormed(name: str, start: Buffers, ends: Sequence[Buffers]) -> Tensor:
    """Of `BatchRenorm`."""
    return counted(name, start, ends) if name.endswith("calls") else averaged(0.9)(name, start, ends)


@dataclass(frozen=True)
class Case:
    """A model, how its chunks' writes come together, and how the job declares it."""

    model: Callable[[], nn.Module]
    merge: Merge
    rules: Mapping[str, BufferRule] = field(default_factory=dict[str, BufferRule])


def extreme(which: Callable[[Tensor], Tensor]) -> BufferRule:
    """The rule of what observers see."""
    return lambda before, left: which(torch.stack(list(left)))


def observed(name: str, start: Buffers, ends: Sequence[Buffers]) -> Tensor:
    """The least or the greatest that a chunk left."""
    value = ends[0][name]
    for end in ends:
        value = torch.minimum(value, end[name]) if name == "least" else torch.maximum(value, end[name])
    return value


CASES = {
    "spectral norm": Case(lambda: Spectral(parametrizations.spectral_norm), last),
    "spectral norm as a hook": Case(lambda: Spectral(spectral_norm), last),
    "moco": Case(MoCo, last),
    "shifted queue": Case(Shifted, last, {"queue": "last"}),
    "dino": Case(DINO, averaged(0.9), {"centre": ema(0.9)}),
    "batch renorm": Case(Renormed, renormed, {"*.calls": "sum", "layers.*": ema(0.9)}),
    "annealed": Case(Annealed, counted, {"steps": "sum"}),
    "observed": Case(
        Observed, observed, {"least": extreme(lambda x: x.amin(0)), "greatest": extreme(lambda x: x.amax(0))}
    ),
}
# over 8 chunks: five of 2 samples, three of 1; batch renormalisation has variances of one sample, too
BATCH = 13


def job_of(case: str, **settings: Any) -> Job:
    """SGD with momentum; the same samples in the same order."""
    known: dict[str, Any] = {
        "model": CASES[case].model, "loss": class_loss, "data": lambda: vectors(4 * BATCH), "batch_size": BATCH, "steps": 4, "shuffle": False,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), "seed": 3,
        "buffers": CASES[case].rules,
        "evaluate": Evaluate(data=lambda: vectors(11), metrics={"loss": class_loss}, every=1),
    }  # fmt: skip
    return Job(**{**known, **settings})


@dataclass(frozen=True)
class Trained:
    """losses, metrics: of every step. state: afterwards."""

    losses: list[float]
    metrics: list[float]
    state: dict[str, Tensor]


def by_the_rule(case: str, model: nn.Module, num_chunks: int, steps: int = 4) -> Trained:
    """One device in float64, also where the code names no precision, whose chunks all start from the buffers
    of before the step.

    model: as a run starts from it.
    """
    usual, samples, held_out = torch.get_default_dtype(), vectors(4 * BATCH), vectors(11)
    torch.set_default_dtype(torch.float64)
    try:
        return _by_the_rule(case, model, num_chunks, steps, samples, held_out)
    finally:
        torch.set_default_dtype(usual)


def _by_the_rule(
    case: str, model: nn.Module, num_chunks: int, steps: int, samples: Samples, held_out: Samples
) -> Trained:
    model.double().train()
    optimizer = torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9
    )
    losses: list[float] = []
    metrics: list[float] = []
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH)
        start, ends, total = _buffers(model), [], 0.0
        optimizer.zero_grad()
        for chunk in rows.tensor_split(num_chunks):
            _put(model, start)
            loss = class_loss(model, _batch(samples, chunk)) * len(chunk)
            (loss / BATCH).backward()
            total += float(loss.detach())
            ends.append(_buffers(model))
        _put(model, {name: CASES[case].merge(name, start, ends) for name in start})
        optimizer.step()
        losses.append(total / BATCH)
        model.eval()
        with torch.no_grad():
            metrics.append(float(class_loss(model, _batch(held_out, torch.arange(11)))))
        model.train()
    return Trained(
        losses,
        metrics,
        {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())},
    )


def _batch(samples: Any, rows: Tensor) -> dict[str, Tensor]:
    found = [samples[int(row)] for row in rows]
    return {
        "x": torch.stack([each["x"] for each in found]).double(),
        "y": torch.stack([each["y"] for each in found]),
    }


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_buffers()}


def _put(model: nn.Module, values: Buffers) -> None:
    with torch.no_grad():
        for name, each in model.named_buffers():
            each.copy_(values[name])

"""Recurrent models and scans."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.attention import next_token, padded, texts
from tests.equality.models.dense import classify


class LSTM(nn.Module):
    """Tokens [batch, 5] -> logits [batch, 5, 11], by torch's LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Bidirectional(nn.Module):
    """Tokens [batch, 6] -> [batch, 4]: torch's GRU in both directions, its last states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 5)
        self.gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        _, last = self.gru(self.embed(tokens))
        return self.head(torch.cat([last[0], last[1]], dim=-1))


class Cell(nn.Module):
    """[batch, 6, 3] -> [batch, 2]: a GRU's cell in a loop over time, written by hand, with a norm in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(3 + 8, 16)
        self.candidate = nn.Linear(3 + 8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for now in x.unbind(dim=1):
            update, reset = torch.sigmoid(self.gates(torch.cat([now, state], dim=-1))).chunk(2, dim=-1)
            candidate = torch.tanh(self.norm(self.candidate(torch.cat([now, reset * state], dim=-1))))
            state = (1 - update) * state + update * candidate
        return self.head(state)


class StateSpace(nn.Module):
    """Tokens [batch, 8] -> logits [batch, 8, 10]: a selective scan as in Mamba, by a loop, and a short convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.enter = nn.Linear(6, 2 * 8, bias=False)
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=2)
        self.selected = nn.Linear(8, 1 + 2 * 4, bias=False)
        self.steps = nn.Linear(1, 8)
        self.log_decay = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(8, 1))
        self.through = nn.Parameter(torch.ones(8))
        self.leave = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inner, gate = self.enter(x).chunk(2, dim=-1)
        inner = F.silu(self.conv(inner.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2))
        step, write, read = self.selected(inner).split([1, 4, 4], dim=-1)
        step = F.softplus(self.steps(step))
        decay = torch.exp(-step.unsqueeze(-1) * self.log_decay.exp())
        written = (step * inner).unsqueeze(-1) * write.unsqueeze(2)
        state, found = torch.zeros_like(written[:, 0]), []
        for place in range(tokens.shape[1]):
            state = decay[:, place] * state + written[:, place]
            found.append((state * read[:, place].unsqueeze(1)).sum(-1))
        mixed = (torch.stack(found, dim=1) + self.through * inner) * F.silu(gate)
        return self.head(self.norm(x + self.leave(mixed)))


class Scan(nn.Module):
    """[batch, 16, 4] -> [batch, 3]: a linear recurrence with gates, computed in parallel in log steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 9)
        self.value = nn.Linear(4, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.sigmoid(self.gate(x))
        state = (1 - decay) * self.value(x)
        shift = 1
        while shift < x.shape[1]:
            before = F.pad(state, (0, 0, shift, 0))[:, : x.shape[1]]
            state = state + decay * before
            decay = decay * F.pad(decay, (0, 0, shift, 0), value=1.0)[:, : x.shape[1]]
            shift *= 2
        return self.head(state[:, -1])


class Speech(nn.Module):
    """[batch, 3, 16] -> log probabilities [8, batch, 6]: convolution, recurrence, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 7, 3, stride=2, padding=1)
        self.rnn = nn.RNN(7, 9, batch_first=True)
        self.head = nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv(x)).transpose(1, 2)
        return self.head(self.rnn(x)[0]).log_softmax(dim=-1).transpose(0, 1)


def transcribe(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Over the letters."""
    found = model(batch["x"])
    frames = torch.full_like(batch["letters"], found.shape[0])
    loss = F.ctc_loss(found, batch["y"], frames, batch["letters"], reduction="sum", zero_infinity=True)
    return loss, batch["letters"].sum()


def series(width: int, length: int, classes: int, seed: int = 40) -> object:
    """x [length, width] normal, y a class."""

    def build(count: int) -> Samples:
        return Samples(x=normal(seed, count, length, width), y=whole(seed + 100, classes, count))

    return build


def speech(count: int) -> Samples:
    return Samples(x=normal(41, count, 3, 16), y=whole(42, 5, count, 3) + 1, letters=whole(43, 3, count) + 1)


RECURRENT = [
    Model(
        name="lstm",
        features="torch's LSTM, two layers",
        build=LSTM,
        loss=next_token,
        samples=texts(11, 5, seed=44),
        stages=2,
    ),
    Model(
        name="bidirectional",
        features="torch's GRU, both directions",
        build=Bidirectional,
        loss=classify,
        samples=padded(12, 6, 4, seed=45),
        stages=2,
    ),
    Model(
        name="cell",
        features="a loop over time",
        build=Cell,
        loss=classify,
        samples=series(3, 6, 2),
        stages=2,
    ),
    Model(
        name="state_space",
        features="selective scan, short convolution; batch = states",
        build=StateSpace,
        loss=next_token,
        samples=texts(10, 8, seed=46),
        chunk=4,
        stages=2,
    ),
    Model(
        name="scan",
        features="parallel scan",
        build=Scan,
        loss=classify,
        samples=series(4, 16, 3, seed=47),
        stages=2,
    ),
    Model(
        name="speech",
        features="convolution, recurrence, CTC",
        build=Speech,
        loss=transcribe,
        samples=speech,
        chunk=2,
        stages=1,
    ),
]

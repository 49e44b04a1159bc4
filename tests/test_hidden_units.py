"""Layers whose output comes back as their input (recurrent networks, x + W x) are divided by hidden units,
and send what they are said to send."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_jobs import job_of
from torch import Tensor, nn

from meshloom.program.operators.recurrent_shards import RecurrentOfPart
from tests.division import Subject, at_random, compare, subject_of
from tests.sent import counted, predicted

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
LIMIT = 1e-10  # float64: sums in another order
BATCH, LENGTH, WIDTH = 3, 5, 7


class Layers(nn.Module):
    """Sequences [b, t, 7] -> all outputs and last states of torch's recurrent layers, from states that are
    learned or zeros."""

    def __init__(self, build: Callable[..., nn.RNNBase], *, learned: bool, **settings: Any) -> None:
        super().__init__()
        self.layers = build(WIDTH, 10, 2, batch_first=True, **settings)
        both, pair = bool(settings.get("bidirectional")), build is nn.LSTM
        self.start = nn.Parameter(torch.randn(2 if pair else 1, 4 if both else 2, 1, 10)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        states = tuple(self.start.expand(-1, -1, len(x), -1)) if self.start is not None else None
        outputs, last = self.layers(x, states[0] if states is not None and len(states) == 1 else states)
        return outputs.square().mean() + sum(
            each.square().mean() for each in (last if isinstance(last, tuple) else (last,))
        )


class Residual(nn.Module):
    """[b, t, 7] -> the same, by layers that are as wide as they are high: x + relu(W x)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.first(x))
        return (x + torch.tanh(self.second(x.mT)).mT).square().mean()


class OwnRecurrence(nn.Module):
    """[b, t, 7] -> a state that a matrix makes anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.inputs = nn.Linear(9, 9), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 9)
        for step in x.unbind(1):
            h = torch.tanh(self.state(h) + self.inputs(step))
        return h.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Layers(nn.LSTM, learned=True, bidirectional=True, dropout=0.2),
    "gru": lambda: Layers(nn.GRU, learned=False, dropout=0.2),
    "rnn": lambda: Layers(nn.RNN, learned=True, bidirectional=True, bias=False),
    "residual": Residual,
    "recurrence": OwnRecurrence,
}


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
    """Each model, read once."""
    generator = torch.Generator().manual_seed(0)
    one, other = ({"x": torch.randn(BATCH, LENGTH, WIDTH, generator=generator)} for _ in range(2))
    return {
        name: subject_of(job_of(build, lambda model, batch: model(batch["x"])), batches=(one, other))
        for name, build in MODELS.items()
    }


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_hidden_units_are_divided_and_compute_what_one_device_does(
    name: str, num_ranks: int, subjects: dict[str, Subject]
):
    compared = compare(subjects[name], num_ranks)
    assert compared.error < LIMIT, compared.what
    sizes = {name: math.prod(each.shape) for name, each in compared.partition.parameters.items()}
    assert sum(
        size for name, size in sizes.items() if not compared.partition.parameters[name].is_whole
    ) > 0.95 * sum(sizes.values())
    assert compare(subjects[name], num_ranks, at_random(num_ranks)).error < LIMIT


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_ranks_send_what_they_are_said_to_send(name: str, num_ranks: int, subjects: dict[str, Subject]):
    subject = subjects[name]
    part = compare(subject, num_ranks).partition
    if name in ("lstm", "gru", "rnn"):
        assert any(isinstance(node.target, RecurrentOfPart) for node in part.programs[0].nodes)
    assert counted(part, subject.model, subject.batch, subject.outputs[0]) == predicted(part)

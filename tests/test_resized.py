"""A batch of another size in mid-run: its program is the one that was compared but for sizes, read without a
model of values; else a model is built.

Found from outside: every new length of a batch built the whole model again on one rank, beside what training
holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.sizes.resized import resized
from meshloom.program.store import checked_capture as module
from meshloom.verify.run import verify
from tests.covering import few
from tests.families import FAMILIES

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

COVERING = {"llama"}
WORDS = 37
NEW_MODELS = ["operators", "drawn", "constants", "numbers"]  # more than sizes changes, or values are needed


class Sentences:
    """Of 4 to 12 words."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(1, WORDS, (4 + index * 7 % 9,), generator=torch.Generator().manual_seed(index))


class Reader(nn.Module):
    """kind: what its forward makes of the length besides attention over it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        # where a large tensor has no values, what is drawn after it is another draw
        words = 500 if kind == "drawn" else WORDS
        self.embedding, self.output = nn.Embedding(words, 12), nn.Linear(12, WORDS)
        self.layer = nn.TransformerEncoderLayer(12, 2, 18, dropout=0.1, batch_first=True)
        self.noise = torch.randn(12)  # neither parameter nor buffer: a constant of programs

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        length = words.shape[1]
        if self.kind == "operators" and length % 2:
            x = x.tanh()
        if self.kind == "constants":
            x = x * torch.tensor([1.0 / length])
        if self.kind == "numbers":
            x = x * length**-0.5
        if self.kind == "drawn":
            x = x + self.noise
        return self.output(self.layer(x))


def loss(model: nn.Module, batch: Any) -> Any:
    words, wanted = batch[:, :-1], batch[:, 1:]
    return F.cross_entropy(model(words).flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum"), (
        wanted != 0
    ).sum()


def job_of(kind: str) -> Job:
    return Job(
        model=lambda: Reader(kind),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        data=Sentences,
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        batch_size=4,
        steps=4,
    )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for every time that a model of the job is built to compare a program with it."""
    found: list[None] = []
    check = module.build_model

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(None)
        return check(*args, **kwargs)

    monkeypatch.setattr(module, "build_model", noted)
    return found


@pytest.mark.covering("attention-tp=2")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("attention", "tp=2"),
        ("attention", "pp=2,microbatches=2"),
        *few([(kind, "tp=2") for kind in NEW_MODELS], 2, pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_every_length_is_trained_as_on_one_device(kind: str, plan: str, compared: list[None]):
    report = verify(job_of(kind), Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=4)
    assert report and report.passed
    assert bool(compared) == (kind in NEW_MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in COVERING else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_it_is_the_program_that_is_read_with_values(name: str):
    """With the last samples left out; a family that is refused, or takes other operators then, is none of
    this test's."""
    job = FAMILIES[name].make_job(True)
    data = job.data()
    whole, less = (
        [default_collate([data[at + each] for each in range(size)]) for at in (0, 3)] for size in (3, 2)
    )
    try:
        known, wanted = (capture(job, (each[0], each[1])) for each in (whole, less))
    except CaptureError:
        return
    found = resized(
        known, job, (less[0], less[1]), lambda model, batches: capture_module(model, job.loss, batches)
    )
    assert found is None or found.digest() == wanted.digest()
    assert found is not None or name not in COVERING

"""A run that resumes reads its loss beside the buffers that the model is built with: those of the checkpoint come later, and
until then their memory holds whatever was in it. The loss was read, compared and searched for what it writes beside that,
so an index out of range was raised, and a teacher was taken for frozen.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshloom.core.buffer_rules import ema
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.parameters import unfilled_model
from meshloom.parameters.values.building import described
from meshloom.parameters.values.building import give_memory as give_memory_to
from meshloom.replica.program_stages import ProgramStages
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer

PLANS = ["tp=2", "pp=2,microbatches=2", "dp=2,zero=3", "dp=2,tp=2"]


class Indexed(nn.Module):
    """A table that a kept buffer looks up in, drawn numbers that are kept, too, and a teacher that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.register_buffer("places", torch.arange(20) * 5 % 7)
        self.register_buffer("noise", torch.randn(20, 12))
        self.first, self.second = nn.Linear(12, 26), nn.Linear(26, 12)
        self.teacher = deepcopy(self.second).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        places: Any = self.places
        noise: Any = self.noise
        return self.second(torch.tanh(self.first(x + self.table(places) + 0.1 * noise)))


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        for mine, trained in zip(model.teacher.parameters(), model.second.parameters(), strict=True):
            mine.lerp_(trained, 0.25)
    return (model(batch["x"]) - model.teacher(torch.tanh(model.first(batch["x"]))).detach()).square().mean()


def job_of() -> Job:
    samples = [{"x": each} for each in torch.randn(24, 20, 12, generator=torch.Generator().manual_seed(3))]
    return Job(
        model=Indexed, data=lambda: samples, loss=loss, optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=0.01),
        batch_size=4, steps=4, buffers={"teacher.*": ema(0.75)},
    )  # fmt: skip


def trained(
    plan: str, steps: int, out: Path, resume: Path | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the model that is saved in the end."""
    with Trainer(
        job_of(), Plan.parse(plan), devices="simulated", steps=steps, out=out, resume=resume, listener=QUIET, cache="off"
    ) as trainer:  # fmt: skip
        is_read = isinstance(trainer.replicas[0].engine.stages, ProgramStages)
        assert is_read == Plan.parse(plan).divides_loss
        losses = [trainer.step(batch) for batch in trainer.batches()]
        model = trainer.save()
        return losses, {
            name: each
            for file in sorted(model.glob("model*.safetensors"))
            for name, each in load_file(file).items()
        }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_resuming_goes_on_whatever_lies_in_new_memory(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    losses, whole = trained(plan, 4, tmp_path / "whole")
    before, _ = trained(plan, 2, tmp_path / "half")
    with_garbage: Any = give_memory_to

    def give_memory(tensor: Tensor) -> None:
        with_garbage(tensor)
        torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0x7B)

    monkeypatch.setattr(unfilled_model, "give_memory", give_memory)
    after, resumed = trained(plan, 4, tmp_path / "half", resume=tmp_path / "half")
    assert [*before, *after] == losses
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(each, resumed[name]) for name, each in whole.items())


def test_standing_in_has_the_buffers_that_the_model_is_built_with():
    torch.manual_seed(4)
    expected = dict(described(Indexed).named_buffers())
    torch.manual_seed(4)
    found = unfilled_model.unfilled_model(lambda: described(Indexed), torch.device("cpu"))
    assert isinstance(found, unfilled_model.UnfilledModel)
    with found.standing_in():
        for name, each in found.model.named_buffers():
            assert torch.equal(each, expected[name])

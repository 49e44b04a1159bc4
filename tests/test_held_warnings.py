"""What a run tries before its first step says nothing before the run's first line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.moments.held_warnings import held_warnings
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.jobs import Samples

pytestmark = [pytest.mark.usefixtures("dear_memory"), pytest.mark.filterwarnings("always")]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    warnings.warn("of the loss", UserWarning, stacklevel=1)
    return model(batch["x"]).square().mean()


class Half(nn.Module):
    """With a frozen parameter, so that the loss is tried for what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(5, 3), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.frozen


@pytest.mark.parametrize(("plan", "before_steps"), [("dp=2", []), ("tp=2", ["of the loss"])])
@pytest.mark.long
def test_warnings_of_trials_come_after_the_first_line_or_with_the_steps(
    plan: str, before_steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program warns of nothing, so what the loss said as it was read is told once."""
    job = Job(
        model=Half, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=lambda: Samples(x=torch.randn(8, 5)), batch_size=4, steps=2,
    )  # fmt: skip
    events: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "of the loss" in str(message):
            events.append(str(message))

    monkeypatch.setattr(warnings, "showwarning", show)
    with Trainer(job, plan, devices="simulated", listener=Listener(started=lambda text: events.append("started"), note=lambda text: None)) as trainer:  # fmt: skip
        assert events == ["started", *before_steps]
        trainer.step(next(iter(trainer.batches())))
    assert events.count("of the loss") == (1 if before_steps else 2)


def test_warnings_are_shown_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))

    def fail() -> None:
        with held_warnings():
            warnings.warn("why", stacklevel=1)
            assert not shown
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert shown == ["why"]

"""State that a module gives its `state_dict` besides tensors, which a checkpoint cannot hold: it is said before the first step.
It was said after the last one, when all was lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshloom.core.errors import CheckpointError, JobError
from meshloom.core.job import Job
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.fitted import fitted
from tests.verified import equals_one_device


class Extra(nn.Module):
    def __init__(self, *, extra: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def job_of(extra: Any) -> Job:
    samples = [{"x": each} for each in torch.randn(12, 5, generator=torch.Generator().manual_seed(3))]
    return Job(
        model=lambda: Extra(extra=extra), data=lambda: samples, loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), batch_size=4, steps=2,
    )  # fmt: skip


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,exchange=async"])
@pytest.mark.long
def test_what_cannot_be_saved_is_said_before_the_first_step(plan: str, tmp_path: Path):
    trainer = None
    with pytest.raises(CheckpointError, match="_extra_state is of type dict.* Let get_extra_state"):
        trainer = Trainer(job_of({"calls": 1}), plan, devices="simulated", out=tmp_path, listener=QUIET)
    assert trainer is None and not list(tmp_path.glob("step-*"))
    fitted(job_of({"calls": 1}), plan, listener=QUIET)


@pytest.mark.long
def test_verify_says_why_it_does_not_resume():
    report = equals_one_device(job_of({"calls": 1}), "dp=2", quick=False, steps=3, dtype=None)
    assert any("nothing was saved and resumed: _extra_state is of type dict" in note for note in report.notes)


def test_a_tensor_is_saved_and_comes_back(tmp_path: Path):
    fitted(job_of(torch.tensor([3, 4])), "dp=2", out=tmp_path, steps=1, listener=QUIET)
    with Trainer(
        job_of(torch.tensor([0, 0])), "dp=2", devices="simulated", resume=tmp_path, listener=QUIET
    ) as trainer:
        trainer.fit()
        model: Any = trainer.replicas[0].model
        assert model.extra.tolist() == [3, 4]


class Added(Extra):
    """A hook gives `state_dict` a tensor more."""

    def __init__(self) -> None:
        super().__init__(extra=torch.zeros(1))
        self._register_state_dict_hook(lambda module, state, prefix, local: state.update(scale=torch.ones(2)))
        self._register_load_state_dict_pre_hook(lambda state, *_: state.pop("scale", None))


@pytest.mark.parametrize("plan", ["pp=2", "dp=2,pp=2"])
@pytest.mark.slow
def test_what_a_hook_adds_is_saved_once(plan: str, tmp_path: Path):
    """The story: it belonged to no stage, so the save after the last step failed."""
    with Trainer(
        replace(job_of(None), model=Added), plan, devices="simulated", out=tmp_path, listener=QUIET
    ) as trainer:
        saved = trainer.fit().checkpoint
    assert saved is not None
    tensors = {
        name: each
        for file in Path(saved).glob("model*.safetensors")
        for name, each in load_file(file).items()
    }
    assert tensors["scale"].tolist() == [1, 1] and tensors["first.weight"].shape == (7, 5)


class Nested(torch.optim.SGD):
    """Its state holds tensors in a dict."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["nested"] = {"mean": torch.zeros(70, 70)}
        return loss


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2"])
@pytest.mark.slow
def test_state_of_optimizers_that_cannot_be_saved_is_found_after_the_first_step(plan: str, tmp_path: Path):
    job = replace(
        job_of(torch.zeros(1)),
        optimizer=lambda named: Nested([each for _, each in named], lr=0.1, momentum=0.9),
        steps=9,
    )
    with Trainer(job, plan, devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        with pytest.raises(JobError, match="nested cannot be saved: mean is a Tensor"):
            trainer.fit()
        assert trainer.next_step == 1
    fitted(job, plan, listener=QUIET)

"""Mistakes whose cause says what is wrong, in words that nothing else has: in reading and mixing, buffers, rows, modes of modules, resuming, and
what both sides share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import meshloom.core.losses.frozen
import meshloom.core.modules.built
import meshloom.data.map_data
import meshloom.data.reading
import meshloom.optimizer.assignment
import meshloom.replica.replica
from meshloom.core.job import Evaluate, Job
from meshloom.core.moments.by_hand import ByHand
from meshloom.core.plan import Plan
from meshloom.exchange.zero_three import ZeroThree
from meshloom.replica.attributes.plain_numbers import PlainNumbers
from meshloom.replica.buffers.norm_statistics import NormStatistics
from meshloom.telemetry.best_metric import BestMetric
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import make_job
from tests.planted.bugs import wrap
from tests.planted.judging import text_of

Plant = Callable[[pytest.MonkeyPatch], None]


class Noisy(Dataset[Any]):
    """Samples with noise, which is drawn anew at each reading."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((7,), float(index)) / 9 + 0.3 * torch.randn(7), "y": torch.tensor(index % 5)}


def mixed(batch: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    share = torch.rand(())
    return {**batch, "x": share * batch["x"] + (1 - share) * others["x"]}


class Cooling(nn.Module):
    """Divides by a temperature that falls with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.temperature = nn.Linear(7, 9), nn.Linear(9, 5), 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(torch.tanh(self.inner(x))) / self.temperature
        if self.training:
            self.temperature *= 0.9
        return x


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def job_of(**settings: Any) -> Job:
    data = Noisy()
    job = make_job("mlp", "adamw", batch_size=6, steps=40)
    job = replace(
        job,
        data=lambda: data,
        model=lambda: nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)),
        loss=loss,
    )
    return replace(job, **settings)


def said(job: Job, plan: str = "dp=2", *, quick: bool = False) -> tuple[Report, str]:
    report = verify(job, Plan.parse(plan), devices="simulated", quick=quick)
    assert report
    return report, " ".join(text_of(report).split())


def draws_of_epoch_0(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.data.map_data.sample_seed
    patch.setattr(meshloom.data.map_data, "sample_seed", lambda seed, epoch, index: right(seed, 0, index))


def one_seed(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.data.map_data.sample_seed
    patch.setattr(meshloom.data.map_data, "sample_seed", lambda seed, epoch, index: right(seed, epoch, 0))


def with_themselves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(meshloom.data.map_data, "partner_order", lambda seed, step, size: list(range(size)))


def draws_of_step_0(patch: pytest.MonkeyPatch) -> None:
    right = meshloom.data.reading.mix_seed
    patch.setattr(meshloom.data.reading, "mix_seed", lambda seed, step: right(seed, 0))


@pytest.mark.parametrize(
    ("plant", "settings", "words"),
    [
        (draws_of_epoch_0, {}, "read with the draws of the first epoch"),
        (one_seed, {}, "read with one seed for all"),
        (with_themselves, {"mix": mixed}, "mixed with themselves"),
        (draws_of_step_0, {"mix": mixed}, "mixed with what mix draws in step 0"),
    ],
)
def test_data_is_named_by_how_it_was_read(
    plant: Plant, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    report, text = said(job_of(**settings))
    assert not report.passed and report.causes[0].kind == "data" and words in text


def test_batches_of_other_steps_sizes_are_named(monkeypatch: pytest.MonkeyPatch):
    right = Job.batch_size_at
    monkeypatch.setattr(Job, "batch_size_at", lambda self, step: right(self, max(step - 1, 0)))
    _, text = said(job_of(batch_sizes={0: 6, 1: 4}), quick=True)
    assert "as batch_sizes says of step 0, and 4 on one device" in text


@pytest.mark.parametrize(
    ("plan", "change", "words"),
    [
        ("dp=2", lambda parts: parts.flip(0), "with the chunks in reverse order"),
        ("dp=3", lambda parts: parts[:1], "of the first chunk alone"),
        ("dp=3", lambda parts: parts[1:], "without replica 0"),
        ("dp=2,microbatches=2", lambda parts: parts.flip(0), "with the replicas in reverse order"),
    ],
)
def test_buffers_are_named_by_what_was_merged(
    plan: str, change: Callable[[Tensor], Tensor], words: str, monkeypatch: pytest.MonkeyPatch
):
    wrap(monkeypatch, NormStatistics, "apply", lambda right, self, parts: right(self, change(parts)))
    report, text = said(job_of(batch_size=9), plan, quick=True)
    assert report.causes[0].kind == "batch statistics" and words in text


def test_a_module_in_another_mode_is_named(monkeypatch: pytest.MonkeyPatch):
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))
        made[1].eval()
        return made

    monkeypatch.setattr("meshloom.parameters.model.as_trained", lambda model: model.train())
    report, text = said(job_of(model=model), quick=True)
    assert not report.passed and "it is in training mode, and in evaluation mode on one device" in text


def test_a_number_that_is_not_resumed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PlainNumbers, "resume", lambda self, values: None)
    _, text = said(job_of(model=Cooling))
    assert (
        "What is resumed is not what was saved. Resumed and saved again, without a step: temperature is None instead of 1.8"
        in text
    )


def test_state_that_is_not_resumed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.optimizer.optimizer_state.load_settings", lambda optimizer, saved: None)
    report, text = said(job_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)))
    assert report.causes[0].kind == "saved" and "What is resumed is not what was saved" in text


def test_a_checkpoint_without_averages_differs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.optimizer.optimizer_state.AVERAGE", "something else")
    _, text = said(job_of(average=0.7))
    assert "The checkpoint has no average of 0.weight, and one device has." in text


def test_names_of_what_is_frozen_are_read_by_one_device_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        meshloom.core.losses.frozen, "names_parameter", lambda text, name: name.startswith(text)
    )
    model = lambda: nn.Sequential(*(nn.Linear(7, 7) for _ in range(10)), nn.Linear(7, 5))  # noqa: E731
    assert not said(job_of(model=model, frozen={"1": range(40)}), quick=True)[0].passed


def test_a_schedule_by_hand_is_called_by_one_device_itself(monkeypatch: pytest.MonkeyPatch):
    def late(self: Any) -> None:
        self._set_rates(self._steps)
        self._steps += 1

    monkeypatch.setattr(ByHand, "step", late)

    def by_hand(optimizer: Any) -> Callable[[int], None]:
        def at(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)

        return at

    report, text = said(job_of(scheduler=by_hand), quick=True)
    assert not report.passed and "the optimizer's settings do not: lr of group 0" in text


def test_hooks_of_a_model_from_outside_are_read_by_one_device_itself(monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    net[0].weight.register_hook(lambda gradient: 3 * gradient)
    job = job_of(model=lambda: net)
    assert said(job, quick=True)[0].passed
    monkeypatch.setattr(meshloom.core.modules.built, "_copied", lambda model, name: copy.deepcopy(model))
    assert not said(job, quick=True)[0].passed


@pytest.mark.parametrize("mistake", ["of", "going_on"])
def test_the_best_evaluation_is_checked_by_itself(mistake: str, monkeypatch: pytest.MonkeyPatch):
    job = job_of(evaluate=Evaluate(data=Noisy, metrics={"loss": loss}, every=2, best="loss:min", patience=3))
    assert said(job, quick=True)[0].passed
    if mistake == "of":
        right = BestMetric.of
        monkeypatch.setattr(
            BestMetric, "of", lambda text, patience: right(text.replace("min", "max"), patience)
        )
    else:
        wrap(
            monkeypatch,
            BestMetric,
            "going_on",
            lambda right, self, saved: replace(right(self, saved), waited=0),
        )
    report, text = said(job, quick=True)
    assert not report.passed and "DIFFERS on both sides" in text


class Flagged(Noisy):
    """With a flag on the first sample."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "flag": torch.tensor(index == 0)}


class Branching(nn.Module):
    """With a branch that batches take that have a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        if bool(flag.any()):
            x = x + self.branch(x)
        return self.head(x)


def branching_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"], batch["flag"]), batch["y"])


def test_what_one_step_uses_and_the_next_does_not_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    """The branch is used in the first step of an epoch, before the run is interrupted."""
    data = Flagged()
    job = job_of(model=Branching, loss=branching_loss, data=lambda: data, shuffle=False)
    assert said(job, "dp=2,zero=3")[0].passed

    def kept(right: Any, self: ZeroThree) -> None:
        entries = [entry for part in self._trained for entry in part.entries]
        used = [entry.used for entry in entries]
        right(self)
        for entry, was in zip(entries, used, strict=True):
            entry.used = was

    wrap(monkeypatch, ZeroThree, "begin_step", kept)
    report, text = said(job, "dp=2,zero=3")
    assert not report.passed and "a gradient under the plan and none on one device" in text
    assert report.first_wrong and report.first_wrong.first_module == "branch"


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_an_expanded_tensor_of_one_sample_has_a_digest(plan: str):
    def shared(batch: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
        share = torch.rand(())
        return {**mixed(batch, others), "share": share.expand(len(batch["x"]))}

    model = lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))  # noqa: E731
    assert said(job_of(batch_size=2, model=model, mix=shared), plan, quick=True)[0].passed


class OfSums(torch.optim.Optimizer):
    """Adagrad without a step that makes the state that the constructor made, as torch's was up to 2.11."""

    def __init__(self, params: Any, lr: float, initial_accumulator_value: float) -> None:
        super().__init__(params, {"lr": lr})
        for each in self.param_groups[0]["params"]:
            self.state[each]["sum"] = torch.full_like(each, initial_accumulator_value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                sums = self.state[each]["sum"].addcmul_(each.grad, each.grad)
                each.addcdiv_(each.grad, sums.sqrt(), value=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, OfSums])
def test_zeros_for_state_that_a_constructor_makes_are_named(kind: Any, monkeypatch: pytest.MonkeyPatch):
    cut = meshloom.optimizer.assignment._cut

    def zeros(value: Any, parameter: nn.Parameter, piece: Any) -> Any:
        found = cut(value, parameter, piece)
        return torch.zeros_like(found) if isinstance(found, Tensor) and found.ndim else found

    monkeypatch.setattr(meshloom.optimizer.assignment, "_cut", zeros)
    optimizer = partial(kind, lr=0.1, initial_accumulator_value=0.3)
    _, text = said(
        job_of(optimizer=lambda named: optimizer([each for _, each in named])), "dp=2,zero=1", quick=True
    )
    assert "with zeros for its state, such as what its constructor had made" in text


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (
            [1 / 2, 1 / 6, 3.0],
            "first.weight 1/2, first.bias 1/6, second.weight 3, second.bias 1/2 times, ...",
        ),
        ([0.0, 1 / 2], "first.weight 0, first.bias 1/2, second.weight 0, second.bias 1/2 times, ..."),
    ],
)
def test_factors_of_each_gradient_are_said(
    factors: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(right: Any, *arguments: Any) -> Any:
        gradients = yield from right(*arguments)
        for number, each in enumerate(gradients):
            each.mul_(factors[number % len(factors)])
        return gradients

    wrap(monkeypatch, meshloom.replica.replica, "finished", scaled)
    report = verify(make_job("mlp", "sgd"), Plan.parse("dp=2"), devices="simulated", quick=True)
    assert report is not None and not report.passed
    assert f"All gradients are each a multiple of one device's ({said})" in report.causes[0].sentence

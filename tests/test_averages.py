"""Moving averages of parameters: torch's own `AveragedModel` on one device, under every plan."""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshloom as ml
import meshloom.optimizer.user_optimizer
import meshloom.verify.plan_evaluation
import meshloom.verify.step_observer
from meshloom.cli.main import main
from meshloom.core.errors import CheckpointError, JobError, PlanError
from meshloom.core.job import Evaluate, Job
from meshloom.core.job_functions import without_averages
from meshloom.core.plan import Plan
from meshloom.optimizer.averages import ParameterAverages
from meshloom.parameters.digest import digest
from meshloom.planner.describe import describe
from meshloom.planner.ranks import step_facts
from meshloom.planner.readings import Readings
from meshloom.telemetry.progress import Listener
from meshloom.verify.run import verify
from tests.fitted import fitted
from tests.jobs import averaged, class_loss, make_job, vectors
from tests.logging_jobs import in_a_plain_loop, logging_job
from tests.processes import on_ranks
from tests.verified import equals_one_device, report_on

TP = "tp=2,tp_placements=first:column+second:row"  # the model is too small to be divided for speed
PLANS = [
    *("dp=2,zero=1", "dp=2,zero=3", TP, "pp=2,microbatches=2"),
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp=2", "dp=2,zero=2", f"dp=2,{TP},zero=3")),
]
QUIET = Listener(started=str, note=str)


def job(**overrides: Any) -> Job:
    evaluate = Evaluate(data=vectors, metrics={"loss": class_loss}, every=2)
    return averaged(plain(**{"evaluate": evaluate, **overrides}), 0.75)


def plain(**overrides: Any) -> Job:
    return logging_job(**{"loss": class_loss, **overrides})


def on_one_device(steps: int) -> tuple[AveragedModel, list[float]]:
    """The averages, and the mean loss of all data under them, after every step."""
    kept: list[AveragedModel] = []
    losses: list[float] = []
    data = vectors().fields

    def after(model: nn.Module, batch: dict[str, Tensor]) -> None:
        """Before the next step is taken."""
        if not kept:
            kept.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)))
        else:
            kept[0].update_parameters(model)
            losses.append(class_loss(kept[0].module, data).item())

    model = in_a_plain_loop(plain(steps=steps), after)
    after(model, data)
    return kept[0], losses


@pytest.fixture(scope="module")
def expected() -> tuple[AveragedModel, list[float]]:
    return on_one_device(4)


def failing_job(labels: list[float]) -> Job:
    """Its metric fails once there are no labels; metrics are tried before the first step."""

    def metric(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not labels:
            raise ValueError("no labels")
        return class_loss(model, batch)

    return job(evaluate=Evaluate(data=vectors, metrics={"metric": metric}, every=100))


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=1"])
@pytest.mark.long
def test_parameters_in_channels_last_have_averages(plan: str):
    """Whose elements lie in memory in another order: under plans that keep whole parameters it ended with an error."""

    def trained(memory_format: torch.memory_format) -> tuple[dict[str, Tensor], float]:
        of = make_job("cnn", "sgd", batch_size=6, steps=3)
        build = of.model
        metrics = {"loss": of.loss}
        with ml.Trainer(
            averaged(replace(of, model=lambda: build().to(memory_format=memory_format), evaluate=Evaluate(data=of.data, metrics=metrics, every=9)), 0.75),
            plan, devices="simulated", listener=QUIET, dtype=torch.float64,
        ) as trainer:  # fmt: skip
            for batch in trainer.batches():
                trainer.step(batch)
            metric = trainer.evaluate()["loss"]
            return {
                name: each.detach().clone() for name, each in trainer.replicas[0].model.named_parameters()
            }, metric

    (ours, ours_metric), (right, right_metric) = (
        trained(torch.channels_last),
        trained(torch.contiguous_format),
    )
    assert ours_metric == pytest.approx(right_metric, rel=1e-9)
    assert all(torch.allclose(ours[name], each, rtol=1e-9, atol=1e-12) for name, each in right.items())


def test_parameters_are_back_after_a_metric_that_fails():
    """A loop of one's own that goes on after the error trained on from the averages."""

    def parameters() -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in trainer.replicas[0].model.named_parameters()}

    labels = [1.0]
    with ml.Trainer(failing_job(labels), "dp=1", devices="simulated", listener=QUIET) as trainer:
        batches = trainer.batches()
        for _ in range(3):
            trainer.step(next(batches))
        before = parameters()
        labels.clear()
        with pytest.raises(JobError, match="no labels"):
            trainer.evaluate()
        assert before and all(torch.equal(parameters()[name], value) for name, value in before.items())
        trainer.step(next(batches))
        batches.close()


def test_nothing_is_saved_after_a_metric_that_fails_while_replicas_have_averages(tmp_path: Path):
    labels = [1.0]
    with ml.Trainer(
        failing_job(labels), "dp=2,zero=1", devices="simulated", listener=QUIET, out=tmp_path
    ) as trainer:
        batches = trainer.batches()
        for _ in range(3):
            trainer.step(next(batches))
        labels.clear()
        with pytest.raises(JobError, match="no labels"):
            trainer.evaluate()
        with pytest.raises(CheckpointError, match="no consistent state"):
            trainer.save()
        batches.close()


def averages_in(path: Path) -> dict[str, Tensor]:
    out = path / "exported"
    assert main(["export", str(path), "--to", "torch", "--out", str(out), "--average", "--overwrite"]) == 0
    return torch.load(out)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_averages_are_evaluated_saved_and_those_of_one_device(
    plan: str, expected: tuple[AveragedModel, list[float]], tmp_path: Path
):
    model, losses = expected
    found: list[float] = []
    listener = Listener(started=str, note=str, evaluated=lambda step, metrics: found.append(metrics["loss"]))
    with ml.Trainer(job(), plan, out=tmp_path, listener=listener) as trainer:
        summary = trainer.fit()
        assert summary.predicted.bytes == summary.counted.bytes
    assert found == pytest.approx([losses[1], losses[3]], rel=1e-6)  # sum order: ranks
    for name, value in averages_in(tmp_path).items():
        torch.testing.assert_close(value, model.module.state_dict()[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("before", "after"), [("dp=2,zero=1", "pp=2,microbatches=2"), (TP, "dp=2,zero=3")])
@pytest.mark.slow
def test_averages_go_on_under_another_plan(
    before: str, after: str, expected: tuple[AveragedModel, list[float]], tmp_path: Path
):
    fitted(job(), before, steps=2, out=tmp_path, listener=QUIET, devices="auto")
    fitted(job(), after, out=tmp_path, resume=tmp_path, listener=QUIET, devices="auto")
    for name, value in averages_in(tmp_path).items():
        torch.testing.assert_close(value, expected[0].module.state_dict()[name], rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_a_run_without_averages_takes_a_checkpoint_with_them_and_the_other_way(tmp_path: Path):
    """They begin with the parameters after the first step that keeps them."""
    fitted(job(), "dp=2", steps=1, out=tmp_path, listener=QUIET, devices="auto")
    fitted(plain(), "dp=2", steps=2, out=tmp_path, resume=tmp_path, listener=QUIET, devices="auto")
    assert main(["export", str(tmp_path), "--to", "torch", "--out", str(tmp_path / "none"), "--average"]) == 2
    with ml.Trainer(job(), "dp=2", steps=3, out=tmp_path, resume=tmp_path, listener=QUIET) as trainer:
        trainer.fit()
        now = {name: value.clone().cpu() for name, value in trainer.replicas[0].model.named_parameters()}
    for name, value in averages_in(tmp_path).items():
        assert torch.equal(value, now[name])


@pytest.mark.long
def test_of_several_optimizers_each_is_averaged():
    def several(*decays: float | None) -> Job:
        def optimizer(named: Any) -> list[torch.optim.Optimizer]:
            made = [torch.optim.SGD(named[part::2], lr=0.1) for part in (0, 1)]
            pairs = zip(made, decays, strict=True)
            return [each if decay is None else ml.Averaged(each, decay) for each, decay in pairs]

        return replace(job(), optimizer=optimizer)

    for decays in ((0.9, 0.5), (0.9, None)):
        with (
            pytest.raises(JobError, match=rf"{decays[0]}, {decays[1]}\. Wrap each optimizer .*\(b, 0\.999\)"),
            ml.Trainer(several(*decays), "dp=1", listener=QUIET),
        ):
            pass
    losses: list[float] = []
    one = averaged(replace(job(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1)), 0.75)
    for the_job in (several(0.75, 0.75), one):
        with ml.Trainer(the_job, "dp=2,zero=1", listener=QUIET) as trainer:
            trainer.fit()
            losses.append(trainer.evaluate()["loss"])
    assert losses[0] == losses[1]


def test_a_loop_without_a_job_has_averages(tmp_path: Path):
    """Of a schedule, resumed; as `AveragedModel`."""
    torch.manual_seed(0)
    model, data = nn.Linear(7, 5), vectors()

    def make(of: nn.Module) -> tuple[ml.Averaged, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = ml.Averaged(torch.optim.AdamW(of.parameters(), lr=0.1), 0.75)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(of: nn.Module, optimizer: ml.Averaged, schedule: Any) -> None:
        optimizer.zero_grad()
        class_loss(of, data.fields).backward()
        optimizer.step()
        schedule.step()

    optimizer, schedule = make(model)
    right: AveragedModel | None = None
    for _ in range(4):
        step(model, optimizer, schedule)
        right = right or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        right.update_parameters(model)
    assert right is not None and optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    own = model.weight.detach().clone()
    with optimizer.averages():
        assert torch.equal(model.weight, right.module.weight) and not torch.equal(model.weight, own)
    assert torch.equal(model.weight, own)
    torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], tmp_path / "last.pt")
    other = nn.Linear(7, 5)
    resumed, its_schedule = make(other)
    for each, state in zip((other, resumed, its_schedule), torch.load(tmp_path / "last.pt"), strict=True):
        each.load_state_dict(state)
    copied, of_copy = copy.deepcopy((resumed, other))
    for each, optimizes, steps in ((other, resumed, 1), (model, optimizer, 1), (of_copy, copied, 0)):
        for _ in range(steps):
            step(each, optimizes, its_schedule)
    with optimizer.averages(), resumed.averages():
        assert torch.equal(model.weight, other.weight)
    with copied.averages():
        assert torch.equal(of_copy.weight, right.module.weight)


def test_what_has_no_average_is_refused():
    averaged = ml.Averaged(torch.optim.SGD([torch.zeros(1)]), 0.5)
    with pytest.raises(JobError, match="takes an optimizer of torch, like .*; of several, wrap each"):
        ml.Averaged(averaged, 0.5)  # pyright: ignore[reportArgumentType]
    with (
        pytest.raises(PlanError, match="where replicas have parameters of their own"),
        ml.Trainer(job(), "dp=2,exchange=async", listener=QUIET) as trainer,
    ):
        trainer.fit()


@pytest.mark.slow
def test_verify_compares_averages():
    report = equals_one_device(job(evaluate=None), "pp=2,microbatches=2", steps=3, dtype=None)
    for step in report.steps:
        compared = {each.name for each in step.errors if each.kind == "average"}
        assert compared == set(dict(make_job("mlp", "sgd").model().named_parameters()))


@pytest.mark.long
def test_verify_names_a_wrong_average(monkeypatch: pytest.MonkeyPatch):
    """A rank whose average moves half as far."""
    update = ParameterAverages.update

    def half(self: ParameterAverages) -> None:
        before = [each.tensor.detach().clone() for each in self.held]
        update(self)
        for each, old in zip(self.held[1:], before[1:], strict=False):
            each.tensor.data.lerp_(old, 0.5)

    monkeypatch.setattr(ParameterAverages, "update", half)
    report = report_on(job(evaluate=None), "dp=2,zero=1", steps=3, dtype=None)
    assert report.first_wrong is not None and report.first_wrong.step == 1
    assert {each.kind for each in report.first_wrong.errors if not each.passed} == {"average"}


@pytest.mark.slow
def test_verify_knows_of_averages_that_the_run_does_not_keep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        meshloom.optimizer.user_optimizer, "without_averages", lambda made: (without_averages(made)[0], None)
    )
    report = report_on(job(), "dp=2,zero=1", quick=False, steps=3, dtype=None)
    assert not report.passed


@pytest.mark.processes
@pytest.mark.slow
def test_processes_with_one_copy_evaluate_averages(
    expected: tuple[AveragedModel, list[float]], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    file = f"{Path(__file__).with_name('logging_jobs.py')}:averaged_job"
    out = tmp_path / "records.jsonl"
    assert main(["train", file, "--plan", "dp=2", "--devices", "cpu", "--json", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = [each["metrics"]["loss"] for each in records if each["event"] == "evaluation"]
    assert found == pytest.approx([expected[1][1], expected[1][3]], rel=1e-6)  # sum order: ranks


@pytest.mark.long
def test_memory_of_averages_is_predicted():
    """As many bytes as there are trained parameters, on one device and in shares."""
    found = [Readings(each) for each in (plain(), job())]
    trained = sum(each.nbytes for each in make_job("mlp", "sgd").model().parameters())
    memories = [describe(each).memory for each in found]
    assert memories[0] and memories[1]
    assert memories[1].optimizer - memories[0].optimizer == trained
    assert memories[1].peak - memories[0].peak == trained
    plan = Plan.parse("dp=2,zero=1")
    shares = [step_facts(each, plan) for each in found]
    assert shares[1].optimizer_factor - shares[0].optimizer_factor == 1.0


@pytest.mark.slow
def test_a_tied_parameter_has_one_average_under_both_names(tmp_path: Path):
    """The embedding is also the output projection, in another stage."""
    small = averaged(make_job("gpt", "adamw", steps=2), 0.5)
    found: list[dict[str, Tensor]] = []
    for number, plan in enumerate(["dp=1,keyed_draws=true", "pp=2,keyed_draws=true"]):
        with ml.Trainer(small, plan, out=tmp_path / str(number), listener=QUIET) as trainer:
            trainer.fit()
            now = {name: each.detach().clone() for name, each in trainer.replicas[0].model.named_parameters()}
        found.append(averages_in(tmp_path / str(number)))
    assert torch.equal(found[1]["embed.weight"], found[1]["head.weight"])
    assert not torch.equal(found[1]["embed.weight"], now["embed.weight"])
    for name, value in found[0].items():
        torch.testing.assert_close(
            found[1][name], value, rtol=1e-4, atol=1e-6
        )  # Adam divides small gradients


@pytest.mark.processes
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.slow
def test_no_rank_shows_averages_while_another_reads(slow: int):
    assert on_ranks(_verified_slowly, 2, slow) == [True, None]


def _verified_slowly(slow: int) -> bool | None:
    """Of one copy of the parameters, which rank `slow` reads for long."""

    def digest_late(tensor: Tensor) -> Tensor:
        time.sleep(0.02 if os.environ["RANK"] == str(slow) else 0.0)
        return digest(tensor)

    with pytest.MonkeyPatch.context() as patch:
        for place in (meshloom.verify.plan_evaluation, meshloom.verify.step_observer):
            patch.setattr(place, "digest", digest_late)
        report = verify(job(), Plan.parse("dp=2"), devices="cpu", quick=False)
    return report.passed if report else None


class TwiceThroughOneLayer(nn.Module):
    """Cut before its head, the second stage has nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


@pytest.mark.slow
def test_a_stage_that_updates_nothing_waits_for_none_of_the_others():
    """Its replicas have a copy of the parameters each, and those of the other stage one for all."""
    tied = replace(job(), model=TwiceThroughOneLayer)
    losses: list[float] = []
    for plan in ("dp=1", "dp=2,pp=2,microbatches=2,cuts=head"):
        with ml.Trainer(tied, plan, listener=QUIET, share=True) as trainer:
            trainer.fit()
            owned = [each.exchange.ownership.memory for each in trainer.replicas]
            losses.append(trainer.evaluate()["loss"])
    assert owned == ["shared", "shared", "whole", "whole"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)

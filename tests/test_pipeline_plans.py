"""Plans with pp, alone and with dp and tp, train what one device trains: on simulated ranks and on processes,
from checkpoint to checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import PlanError, TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def keyed(job: Job, plan: str, **settings: Any) -> Trainer:
    return Trainer(job, f"{plan},keyed_draws=true", devices="simulated", dtype=torch.float64, **settings)


@pytest.mark.slow
def test_a_stage_without_parameters_divides_none_over_tp():
    """Its ranks took part in bringing gradients together for Adafactor, with the whole parameters of the
    other stage."""
    plan = Plan.parse("dp=2,pp=2,tp=2,microbatches=3,zero=1,schedule=zb-h1")
    job = replace(make_job("mlp", "adafactor"), model=lambda: nn.Linear(7, 5))
    report = equals_one_device(job, plan)
    assert min(report.owned) == 0 and max(report.owned) < 0.75


@pytest.mark.slow
def test_every_parameter_is_owned_once_and_the_rest_is_let_go():
    with keyed(make_job("gpt", "sgd"), "pp=3") as trainer:
        whole = dict(make_job("gpt", "sgd").model().named_parameters())
        owners: dict[str, list[int]] = {name: [] for name in whole}
        for rank, replica in enumerate(trainer.replicas):
            for name, parameter in replica.named:
                owners[name].append(rank)
                assert parameter.shape == whole[name].shape
            held = {name for name, each in replica.model.named_parameters() if not each.is_meta}
            assert len(held) < len(whole)
        assert all(len(ranks) == 1 for ranks in owners.values())
        lent = trainer.replicas[0].engine.ownership.lent  # type: ignore[union-attr]
        assert lent == ["embed.weight"]  # tied to the head


@pytest.mark.slow
def test_evaluation_is_one_devices():
    def error(model: torch.nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]).argmax(-1) != batch["y"]).double().mean()

    job = make_job("cnn", "sgd")
    job = replace(job, evaluate=Evaluate(data=job.data, metrics={"error": error, "loss": job.loss}, every=2))
    found = []
    for plan in (
        "dp=1,microbatches=2",
        "tp=2,microbatches=2",
        "dp=2,pp=2,tp=2",
        "pp=2,microbatches=2,schedule=zb-v",
    ):
        with keyed(job, plan, steps=2) as trainer:
            found.append(trainer.fit().evaluation)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-12)


class Halved(torch.nn.Module):
    """[batch, 7] -> [batch, 5], through the halves of one weight, of which two stages have one each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(14, 7) / 7)
        self.between = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.split([7, 7])
        return self.head(self.between(torch.tanh(x @ first)) @ second)


@pytest.mark.slow
def test_a_part_of_a_weight_is_sent_in_evaluations_too():
    """Without gradients it is a leaf that requires them, of which there is no edge in a graph."""
    job = make_job("mlp", "sgd")
    job = replace(job, model=Halved, evaluate=Evaluate(data=job.data, metrics={"loss": job.loss}, every=2))
    found = []
    for plan in ("dp=1,microbatches=2", "pp=2,microbatches=2,cuts=between"):
        with keyed(job, plan, steps=2) as trainer:
            found.append(trainer.fit().evaluation)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


GRID = "dp=2,pp=2,tp=2,microbatches=2"


@pytest.mark.parametrize(
    ("model", "optimizer", "saved", "resumed"),
    [
        ("gpt", "adamw", f"{GRID},zero=1", ("tp=4,microbatches=4", "dp=1,microbatches=4")),
        ("cnn", "sgd", "pp=2,microbatches=4,schedule=zb-v", (GRID, "dp=4,zero=1")),
        ("gpt", "muon", "dp=1,microbatches=4", (GRID, "pp=3,microbatches=4")),
        ("gpt", "muon", f"{GRID},zero=1", ("tp=3,microbatches=4", "pp=2,microbatches=4,schedule=zb-h1")),
        ("unused_twice", "adamw", f"{GRID},schedule=interleaved", ("tp=2,microbatches=4", "dp=4")),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_goes_on_under_any_plan(
    model: str, optimizer: str, saved: str, resumed: tuple[str, ...], tmp_path: Path
):
    job = make_job(model, optimizer)
    # batch norm sees chunks, so all plans have four
    with keyed(job, "dp=1,microbatches=4", steps=4) as trainer:
        expected = trainer.fit().last_loss
    with keyed(job, saved, steps=2, out=tmp_path) as trainer:
        trainer.fit()
    for plan in resumed:
        with keyed(job, plan, steps=4, resume=tmp_path) as trainer:
            assert trainer.fit().last_loss == pytest.approx(expected, rel=1e-11)


def test_ranks_that_drift_apart_are_found():
    with keyed(make_job("gpt", "sgd"), "pp=2", steps=1) as trainer:
        borrowed = dict(trainer.replicas[1].model.named_parameters())["embed.weight"]
        with torch.no_grad():
            borrowed.view(-1)[0] += 1e-9
        trainer.replicas[1].engine.ownership.lend = lambda *held: iter(())  # type: ignore[union-attr, assignment, method-assign]
        trainer.replicas[0].engine.ownership.lend = lambda *held: iter(())  # type: ignore[union-attr, assignment, method-assign]
        with pytest.raises(
            TrainingError,
            match=r"embed.weight differs between ranks pp=0 and pp=1, which both hold a full copy",
        ):
            trainer.fit()


@pytest.mark.slow
def test_there_is_no_cut_before_what_runs_first():
    with pytest.raises(PlanError, match=r"the model cannot be cut before embed, which runs first"):
        keyed(make_job("gpt", "sgd"), "pp=2,cuts=embed")


def _log_loss(model: torch.nn.Module, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.log(-model(batch["x"]).abs() - 1), batch["y"])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_rank_and_operator():
    for plan, rank in (("pp=2,microbatches=2", 1), ("dp=2,pp=2,tp=2", 4), ("tp=2", 0)):
        with (
            keyed(replace(make_job("mlp", "sgd"), loss=_log_loss), plan, steps=1) as trainer,
            pytest.raises(TrainingError) as raised,
        ):
            trainer.fit()
        text = str(raised.value)
        assert text.startswith(
            f"The loss of step 0 is nan: rank {rank}, microbatch 0; the first operator that gives NaN is log in "
        )
        assert "test_pipeline_plans.py" in text


@pytest.mark.slow
def test_a_stage_that_only_has_dropout_has_nothing_to_do_in_evaluation():
    job = make_job("cnn", "sgd")
    job = replace(job, evaluate=Evaluate(data=job.data, metrics={"loss": job.loss}, every=1))
    found = []
    for plan in ("dp=1,microbatches=2", "pp=4,microbatches=2,cuts=norm2+dropout+hidden"):
        with keyed(job, plan, steps=2) as trainer:
            found.append(trainer.fit().evaluation["loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-12)

"""Several losses that take turns in a step, under every plan: a plain loop on one device computes the same."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import meshloom as ml
from meshloom.core.losses.turns import OwnGradients
from meshloom.core.random import seed_of_turn
from meshloom.replica import chunk_scope
from meshloom.replica.replica_state import full_state
from meshloom.report.terminal import progress_text
from meshloom.telemetry.progress import QUIET
from meshloom.verify.findings import print_report
from meshloom.verify.run import verify
from tests.loss_turns_jobs import LOSSES, STEPS, adam, data, one_device, sparse_job, turns_job
from tests.processes import on_ranks
from tests.reports import largest_error

TOLERANCE = 1e-10  # float64; sums over samples and ranks in other orders
PLANS = [
    "dp=1",
    "dp=1,microbatches=3",
    "dp=2",
    "dp=3,zero=1,bucket_bytes=200",
    "dp=2,zero=2,microbatches=3",
    "dp=2,zero=3",
    "tp=2",
    "pp=2,microbatches=2",
    "pp=2,microbatches=3,schedule=zb-h1",
    "dp=2,tp=2,zero=1",
    "dp=2,pp=2,zero=3,microbatches=2",
    "dp=2,pp=2,tp=2",
    "dp=1,recompute=full,microbatches=3",
]
QUICK = {("wgan", "dp=1"), ("wgan", "dp=3,zero=1,bucket_bytes=200"), ("agent", "dp=2,zero=3")}
COVERING = {
    ("penalty", "pp=2,microbatches=2"),
    ("agent", "dp=2,tp=2,zero=1"),
    ("norms", "dp=2,zero=2,microbatches=3"),
}

pytestmark = pytest.mark.usefixtures("silent_export")


def marks(name: str, plan: str) -> Any:
    if (name, plan) in QUICK:
        return ()
    return pytest.mark.long if (name, plan) in COVERING else pytest.mark.slow


@pytest.mark.long
@pytest.mark.covering("wgan dp=1", "wgan dp=3", "agent dp=2,zero=3", "norms")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=marks(name, plan), id=f"{name} {plan}")
        for name in LOSSES
        for plan in PLANS
    ],
)
def test_turns_are_those_of_a_plain_loop(name: str, plan: str):
    parsed = ml.Plan.parse(f"{plan},keyed_draws=true")
    with ml.Trainer(turns_job(name), parsed, devices="simulated") as trainer:
        for batch, (losses, model) in zip(
            trainer.batches(), one_device(name, [parsed.num_chunks] * STEPS), strict=True
        ):
            trainer.step(batch)
            assert trainer.losses == pytest.approx(losses, rel=TOLERANCE, abs=TOLERANCE)
            found = trainer.together(full_state)[0]
            for key, value in model.state_dict().items():
                assert torch.allclose(found[key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), (
                    key
                )
        summary = trainer.summary(1.0, {}, None)
        assert summary.predicted == summary.counted
        assert trainer.next_step == STEPS


@pytest.mark.parametrize(
    ("name", "plan"),
    [pytest.param("norms", "dp=2,zero=1,microbatches=2", marks=pytest.mark.long),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (("penalty", "dp=2,pp=2,tp=2"), ("agent", "dp=2,zero=3"), ("wgan", "tp=2")))],
)  # fmt: skip
@pytest.mark.long
def test_verification_follows_the_turns(name: str, plan: str):
    report = verify(turns_job(name), ml.Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    assert report.passed, report.worst()
    assert largest_error(report) <= TOLERANCE
    assert len(report.steps) == {"wgan": 5, "agent": 8}.get(name, 4)
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    assert f"2 steps of {len(report.steps)} turns" in stream.getvalue()
    assert f"\n1 {report.steps[-1].turn} " in stream.getvalue()


SPARSE = ["dp=2", "tp=2", "pp=2,microbatches=2", "dp=2,zero=3", "dp=2,pp=2,zero=3,microbatches=2"]


@pytest.mark.parametrize(
    "plan",
    [pytest.param("dp=2,zero=1", marks=pytest.mark.long)]
    + [pytest.param(each, marks=pytest.mark.slow) for each in SPARSE],
)
@pytest.mark.long
def test_sparse_gradients_and_frozen_parts_take_turns(plan: str):
    report = verify(sparse_job(), ml.Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    assert report.passed, report.worst()
    with ml.Trainer(sparse_job(), plan, devices="simulated", listener=QUIET) as trainer:
        summary = trainer.fit()
    assert summary.predicted == summary.counted


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["swapped draws", "gradients of both"])
def test_verification_finds_a_wrong_turn(mistake: str, monkeypatch: pytest.MonkeyPatch):
    if mistake == "swapped draws":
        monkeypatch.setattr(chunk_scope, "seed_of_turn", lambda seed, draws: seed_of_turn(seed, 1 - draws))
    else:
        monkeypatch.setattr(OwnGradients, "of", lambda self, loss: nullcontext())
    report = verify(turns_job("norms"), ml.Plan(), devices="simulated", steps=1, dtype=torch.float64)
    assert report is not None and not report.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved_under", "resumed_under"),
    [pytest.param("wgan", "dp=2,zero=1", "tp=2", marks=pytest.mark.long), pytest.param("agent", "dp=3,zero=3", "pp=2,microbatches=3", marks=pytest.mark.slow),
     pytest.param("penalty", "pp=2,microbatches=2", "dp=2,zero=2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_checkpoint_goes_on_under_another_plan(
    name: str, saved_under: str, resumed_under: str, tmp_path: Path
):
    """In the middle of an epoch, and after a step in which not every loss was due."""
    plans = [ml.Plan.parse(f"{plan},keyed_draws=true") for plan in (saved_under, resumed_under)]
    with ml.Trainer(turns_job(name), plans[0], devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            if trainer.next_step == 3:
                trainer.save()
                break
        expected = trainer.together(full_state)[0]
    with ml.Trainer(
        turns_job(name), plans[1], devices="simulated", resume=tmp_path, listener=QUIET
    ) as trainer:
        found = trainer.together(full_state)[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        batch = next(trainer.batches())
        trainer.step(batch)
        found = trainer.together(full_state)[0]
    *_, (_, model) = one_device(name, [plans[0].num_chunks] * 3 + [plans[1].num_chunks])
    for key, value in model.state_dict().items():
        assert torch.allclose(found[key], value, rtol=TOLERANCE, atol=TOLERANCE), key


def test_resuming_takes_the_same_losses(tmp_path: Path):
    job = turns_job("agent", steps=2)
    with ml.Trainer(job, devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        trainer.fit()
    loss = LOSSES["agent"]["actor"].loss
    one = ml.Job(model=job.model, loss=loss, optimizer=adam, data=data, batch_size=7, steps=3, seed=5)
    with pytest.raises(ml.MeshloomError, match="The checkpoint has 2 optimizers and the job 1"):
        ml.Trainer(one, devices="simulated", resume=tmp_path, listener=QUIET)


@pytest.mark.slow
@pytest.mark.long
def test_an_annealed_loss_may_be_a_metric_under_every_plan():
    """The function of a loss, which trains its own parameters, is a metric of the whole model, too."""

    def annealed(model: Any, batch: Any) -> Any:
        return LOSSES["agent"]["critic"].loss(model, batch) / (1.0 + ml.step())

    losses = {**LOSSES["agent"], "critic": replace(LOSSES["agent"]["critic"], loss=annealed)}
    evaluate = ml.Evaluate(data=data, metrics={"value": annealed}, every=1)
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    for plan in ("dp=1", "pp=2,microbatches=2"):
        job = turns_job("agent", steps=2, losses=losses, evaluate=evaluate)
        with ml.Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
            found.append((trainer.fit().evaluation, trainer.losses))
    assert found[1][0] == pytest.approx(found[0][0], rel=TOLERANCE)
    assert found[1][1] == pytest.approx(found[0][1], rel=TOLERANCE)


def test_evaluation_and_step_are_of_the_whole_step():
    seen: list[int] = []

    def counting(model: Any, batch: Any) -> Any:
        seen.append(ml.step())
        return LOSSES["agent"]["critic"].loss(model, batch)

    losses = {**LOSSES["agent"], "critic": replace(LOSSES["agent"]["critic"], loss=counting)}
    metrics = {"value": LOSSES["agent"]["critic"].loss}
    evaluate = ml.Evaluate(data=lambda: turns_job("agent").data(), metrics=metrics, every=2)
    job = turns_job("agent", steps=2, losses=losses, evaluate=evaluate)
    progress: list[ml.Progress] = []
    listener = ml.Listener(started=lambda text: None, step=progress.append)
    with ml.Trainer(job, devices="simulated", listener=listener) as trainer:
        summary = trainer.fit()
    assert seen == [0, 0, 0, 1, 1, 1]
    assert summary.evaluation.keys() == {"value"}
    assert [set(each.losses) for each in progress] == [{"actor", "critic"}] * 2
    assert progress[-1].loss == progress[-1].losses["actor"] == summary.last_loss
    assert "actor -" in progress_text(progress[-1]) or "actor 0" in progress_text(progress[-1])


def on_a_rank(plan: str, transport: str) -> tuple[dict[str, float], bool]:
    with ml.Trainer(turns_job("wgan"), f"{plan},keyed_draws=true", transport=transport, share=True, listener=QUIET) as trainer:  # fmt: skip
        summary = trainer.fit()
        return trainer.losses, summary.predicted == summary.counted


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "transport"),
    [("dp=2,zero=3", "gloo"), pytest.param("dp=2", "auto", marks=pytest.mark.slow), pytest.param("pp=2,microbatches=2", "auto", marks=pytest.mark.slow)],
)  # fmt: skip
def test_processes_take_the_same_turns(plan: str, transport: str):
    """With transport=auto both replicas have one copy of the parameters."""
    *_, (losses, _) = one_device("wgan", [2] * STEPS)
    for found, is_as_predicted in on_ranks(on_a_rank, 2, plan, transport):
        assert found == pytest.approx(losses, rel=TOLERANCE, abs=TOLERANCE)
        assert is_as_predicted


def mistaken(**changes: Any) -> ml.Job:
    """The WGAN with something wrong in its critic."""
    losses = {**LOSSES["wgan"], "critic": replace(LOSSES["wgan"]["critic"], **changes)}
    return ml.Job(model=turns_job("wgan").model, losses=losses, data=data, batch_size=7, steps=2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parameters": ["critic", "generator.0"]}, "generator.0.weight belongs to two losses, 'critic' and 'generator'."),
        ({"parameters": "critic.0"}, "critic.2.weight belongs to no loss, and 1 more do not either. Name it in the parameters=... of one of"),
        ({"parameters": ["critic", "discriminator"]}, "parameters='discriminator' of loss 'critic' names none of the model's 8 trainable parameters"),
        ({"parameters": lambda name: False}, "parameters=... of loss 'critic' names none of the model's 8 trainable parameters"),
        ({"loss": lambda model, batch: model.critic(batch["x"]).mean().detach()}, "The loss 'critic' does not depend on any of its own parameters"),
        ({"loss": lambda model, batch: model.generator(batch["x"][:, :3]).mean()}, "The loss 'critic' does not depend on any of its own parameters"),
        ({"loss": lambda model, batch: model.critic(batch["x"])}, "The loss function of 'critic' returned a tensor of shape [7, 1]"),
        ({"loss": lambda model, batch: model.critic(batch["x"]).mean() * float("nan")}, "The loss 'critic' of step 0 is nan"),
        ({"optimizer": lambda named: []}, "The optimizer function of loss 'critic' returned an empty list."),
    ],
)  # fmt: skip
def test_a_mistake_is_said_in_one_sentence(changes: dict[str, Any], sentence: str):
    with (
        pytest.raises(ml.MeshloomError, match=re.escape(sentence)),
        ml.Trainer(mistaken(**changes), devices="simulated", listener=QUIET) as trainer,
    ):
        trainer.fit()


@pytest.mark.covering("tp=2")
@pytest.mark.long
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
@pytest.mark.slow
def test_a_loss_without_gradients_is_said_under_plans_that_read_it(plan: str):
    job = mistaken(loss=lambda model, batch: model.generator(batch["x"][:, :3]).mean())
    with (
        pytest.raises(
            ml.MeshloomError, match="The loss 'critic' does not depend on any of its own parameters"
        ),
        ml.Trainer(job, plan, devices="simulated", listener=QUIET) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("plan", ["dp=2,exchange=local_sgd,local_steps=2", "dp=2,exchange=diloco,local_steps=2", "dp=2,exchange=async,servers=1"])  # fmt: skip
def test_exchanges_without_turns_are_refused(plan: str):
    with pytest.raises(ml.MeshloomError, match="is for jobs of one loss, and this one has 2"):
        ml.Trainer(turns_job("wgan"), plan, devices="simulated", listener=QUIET)


@pytest.mark.slow
@pytest.mark.long
def test_one_function_may_be_two_losses():
    """A saddle point by descent and ascent: maximize=True of the one optimizer."""

    def value(model: nn.Module, batch: Any) -> Any:
        return (model[0](batch["x"]) * model[1](batch["x"])).mean()

    losses = {
        "down": ml.Objective(loss=value, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), parameters="0"),
        "up": ml.Objective(loss=value, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, maximize=True), parameters="1"),
    }  # fmt: skip
    model = lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 3)).double()  # noqa: E731
    job = ml.Job(model=model, losses=losses, data=data, batch_size=7, steps=3)
    report = verify(
        job, ml.Plan.parse("pp=2,microbatches=2"), devices="simulated", steps=2, dtype=torch.float64
    )
    assert report is not None
    assert report.passed, report.worst()

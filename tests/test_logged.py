"""`meshloom.log` in a loss: means over the whole global batch, weighted as the loss is, under every plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.errors import JobError
from meshloom.report.terminal import progress_text
from meshloom.telemetry.progress import Listener, Progress
from tests.jobs import class_loss
from tests.logging_jobs import in_a_plain_loop, logging_job, logging_loss


def logged_under(job: ml.Job, plan: str) -> list[Progress]:
    found: list[Progress] = []
    with ml.Trainer(job, plan, listener=Listener(started=str, note=str, step=found.append)) as trainer:
        summary = trainer.fit()
        assert summary.predicted.bytes == summary.counted.bytes
    return found


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,microbatches=2",
        "dp=2,zero=3",
        "dp=2,exchange=local_sgd,local_steps=2",
        "tp=2,tp_placements=first:column+second:row+head:column",
        "pp=2,microbatches=2",
        "dp=2,pp=2,tp=2,tp_placements=first:column+head:row",
    ],
)
@pytest.mark.slow
def test_means_are_those_of_one_device(plan: str):
    """Also of batches of 6 samples over four chunks, whose weights differ."""
    job, expected = logging_job(), []

    def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> None:
        weights = 1.0 + (batch["y"] == 0)
        right = (model(batch["x"]).argmax(1) == batch["y"]) * weights
        expected.append(float(right.sum() / weights.sum()))

    in_a_plain_loop(job, accuracy)
    found = [each.logged for each in logged_under(job, plan)]
    assert len(set(expected)) > 1
    if "local_sgd" in plan:  # each replica has parameters of its own after the first step
        found, expected = found[:1], expected[:1]
    assert [each["width"] for each in found] == [5.0] * len(expected)
    assert [each["accuracy"] for each in found] == pytest.approx(expected, rel=1e-6)  # sum order: chunks


def test_a_name_that_only_some_chunks_log_is_their_mean():
    """And a name that comes up later, on one replica, is known to all from then on."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if ml.step() % 2:
            ml.log("late", batch["y"].float().mean())
        if bool((batch["y"] == 3).any()):
            ml.log("third", batch["x"].shape[0])
        return class_loss(model, batch)

    found = [each.logged for each in logged_under(logging_job(loss=loss), "dp=3")]
    assert ["late" in each for each in found] == [False, True, False, True]
    assert {each.get("third") for each in found} <= {None, 4.0, 2.0, 3.0}


@pytest.mark.parametrize("is_mean", [False, True])
def test_means_of_bfloat16_values_are_not_rounded(is_mean: bool):
    """Nor those of values in the model's own precision, where it is verified in a higher one."""
    values: list[float] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor] | Tensor:
        share = (batch["y"].float().mean() / 7).bfloat16()
        ml.log("share", share)
        values.append(float(share))
        mean = class_loss(model, batch)
        return mean if is_mean else (mean * 6, torch.tensor(6.0, dtype=torch.bfloat16))

    (found,) = logged_under(logging_job(loss=loss, steps=1, batch_size=12), "microbatches=2")
    assert found.logged == {"share": pytest.approx(sum(values[-2:]) / 2, rel=1e-15)}


def test_the_loss_runs_on_its_own_and_its_values_are_shown():
    batch = {"x": torch.ones(2, 7), "y": torch.zeros(2, dtype=torch.int64)}
    total, weight = logging_loss(nn.Linear(7, 5), batch)
    assert weight == 4 and total.requires_grad
    (last,) = logged_under(logging_job(steps=1), "dp=1")
    assert f"accuracy {last.logged['accuracy']:.4f}  width 5.0000" in progress_text(last)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x", torch.ones(3), r"got a tensor of shape \[3\]. Give one number"),
        ("x", "high", "got a str. Give one number"),
        ("", 1.0, "takes a name first"),
        ("loss", 1.0, "a step reports 'loss' of its own"),
    ],
)
def test_what_cannot_be_logged_is_refused(name: str, value: object, said: str):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ml.log(name, value)  # pyright: ignore[reportArgumentType]
        return class_loss(model, batch)

    with pytest.raises(JobError, match=said):
        logged_under(logging_job(loss=loss), "dp=2")

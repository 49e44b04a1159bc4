"""Uneven shares, fixed and changing, equal one device that runs the same chunks; a slow rank gets less to
do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.errors import PlanError
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, sample_order, seed_everything
from meshloom.data.map_data import MapReader
from meshloom.replica.loss_sums import LossSums
from meshloom.telemetry.progress import QUIET, Listener
from meshloom.train.trainer import Trainer
from meshloom.verify.findings import Report
from meshloom.verify.reference.reference import Reference
from tests.held import step_of
from tests.jobs import class_loss, make_job
from tests.processes import on_ranks
from tests.sleepy_job import sleepy_job
from tests.verified import report_on

# in the middle of a run of five steps of 12, 12, 6, 12, 12 samples
CHANGES = [(1, (7, 3, 2)), (3, (1, 0, 11))]


def run(job: Job, plan: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and what the model was in the end, on simulated devices in float64."""
    with Trainer(job, plan, devices="simulated", dtype=torch.float64, listener=QUIET, **settings) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
        return losses, {name: each.clone() for name, each in trainer.replicas[-1].model.state_dict().items()}


def save_after_two_steps(job: Job, out: Path, **settings: Any) -> None:
    """With the recorded shares."""
    with Trainer(
        job, "dp=3,shares=measured", devices="simulated", listener=QUIET, recorded_shares=CHANGES, out=out, steps=2, **settings
    ) as trainer:  # fmt: skip
        for batch in trainer.batches():
            trainer.step(batch)
        trainer.save()


def plain_loop(job: Job, steps: int) -> tuple[list[float], nn.Module]:
    """The job on whole batches, as anyone would write it: where samples do not interact, chunks do not
    matter."""
    seed_everything(model_seed(job.seed))
    model = job.model().double()
    optimizer: Any = job.optimizer(list(model.named_parameters()))
    scheduler: Any = job.scheduler(optimizer) if job.scheduler else None
    data, losses = job.data(), list[float]()
    indices = [index for epoch in range(3) for index in sample_order(job.seed, epoch, 30, True)]
    for start, stop in [(0, 12), (12, 24), (24, 30), (30, 42), (42, 54)][:steps]:
        batch = default_collate([data[index] for index in indices[start:stop]])
        optimizer.zero_grad()
        loss = class_loss(model, {"x": batch["x"].double(), "y": batch["y"]})
        loss.backward()
        if job.clip_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    "plan", ["dp=3,microbatches=2,zero=1", "dp=3", "dp=3,exchange=server,servers=2", "dp=3,compress=topk:1"]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.long
def test_shares_that_change_in_the_middle_of_a_run_do_not_change_what_is_learned(
    plan: str, optimizer: str
) -> None:
    job = make_job("mlp", optimizer, steps=5)
    losses, model = plain_loop(job, 5)
    for shares, record in (("measured", CHANGES), ("0+5+2", [])):
        found, state = run(job, f"{plan},shares={shares}", recorded_shares=record)
        assert found == pytest.approx(losses, rel=1e-10)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name].cpu(), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("model", "optimizer"), [("cnn", "adamw"), ("gpt", "muon"), ("branch", "sgd")])
@pytest.mark.slow
def test_where_chunks_matter_they_are_those_of_the_record(model: str, optimizer: str) -> None:
    job = make_job(model, optimizer, steps=5)
    plan = Plan(dp=3, microbatches=2, shares="measured", keyed_draws=True)
    losses, state = run(job, str(plan), recorded_shares=CHANGES)
    reference = Reference(job, plan, torch.float64, shares=CHANGES)
    records = [step_of(reference) for _ in range(5)]
    assert losses == pytest.approx([record.loss for record in records], rel=1e-10)
    for name, value in {**records[-1].parameters, **records[-1].buffers}.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)
    even = Reference(job, plan, torch.float64)
    others = [step_of(even).loss for _ in range(5)]
    assert losses != pytest.approx(others, rel=1e-4)


@pytest.mark.long
def test_evaluation_does_not_depend_on_shares() -> None:
    def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return class_loss(model, batch)

    job = make_job("mlp", "sgd", steps=2)
    job = replace(job, evaluate=Evaluate(data=job.data, metrics={"loss": mean_loss}, every=1))
    found: list[float] = []
    for shares, record in (("even", []), ("9+0+2", []), ("measured", [(1, (1, 1, 10))])):
        with Trainer(
            job,
            f"dp=3,shares={shares}",
            devices="simulated",
            dtype=torch.float64,
            listener=QUIET,
            recorded_shares=record,
        ) as trainer:
            for batch in trainer.batches():
                trainer.step(batch)
            found.append(trainer.evaluate()["loss"])
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-10)


# --- Going on.


@pytest.mark.long
def test_a_checkpoint_keeps_the_shares_so_far_and_those_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # or a GPU adds up in any order
    job = make_job("cnn", "adamw", steps=5)
    plan = "dp=3,shares=measured"
    losses, state = run(job, plan, recorded_shares=CHANGES)
    save_after_two_steps(job, tmp_path, dtype=torch.float64)
    found, resumed = run(job, plan, resume=tmp_path)
    assert found == losses[2:]
    assert all(torch.equal(resumed[name], value) for name, value in state.items())


@pytest.mark.long
def test_with_another_number_of_replicas_shares_begin_anew_and_that_is_said(tmp_path: Path) -> None:
    job, notes = make_job("mlp", "sgd", steps=4), list[str]()
    listener = Listener(started=lambda text: None, note=notes.append)
    save_after_two_steps(job, tmp_path)
    with Trainer(
        job, "dp=2,shares=measured", devices="simulated", listener=listener, resume=tmp_path
    ) as trainer:
        sizes = [
            [chunk.samples for chunk in batch.chunks] for batch in trainer.batches() if [trainer.step(batch)]
        ]
    assert sizes == [[3, 3], [6, 6]]
    assert "The shares in the checkpoint are of dp=3 replicas, so shares begin even for dp=2." in notes


def test_simulated_ranks_have_no_speed_and_that_is_said() -> None:
    notes: list[str] = []
    job = make_job("mlp", "sgd", steps=2)
    with Trainer(
        job,
        "dp=3,shares=measured",
        devices="simulated",
        listener=Listener(started=notes.append, note=notes.append),
    ) as trainer:
        assert [
            [chunk.samples for chunk in batch.chunks] for batch in trainer.batches() if [trainer.step(batch)]
        ] == [[4, 4, 4]] * 2
    assert (
        "shares=measured: simulated ranks have no speeds of their own, so shares stay as they are." in notes
    )


# --- Verification.


def report_of(model: str, optimizer: str, plan: str, steps: int = 3, **settings: Any) -> Report:
    return report_on(make_job(model, optimizer, **settings), plan, steps=steps)


@pytest.mark.long
def test_every_step_of_a_measured_plan_is_verified_with_other_shares() -> None:
    seen: list[tuple[int, ...]] = []
    cuts = MapReader._cut

    def noted(self: MapReader, step: int, num_samples: int) -> Any:
        seen.append((step, self._replica, sum(samples for _, _, samples in cuts(self, step, num_samples))))
        return cuts(self, step, num_samples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MapReader, "_cut", noted)
        assert report_of("mlp", "sgd", "dp=3,shares=measured", drop_last=True).passed
    assert sorted(set(seen)) == [
        (0, 0, 4),
        (0, 1, 4),
        (0, 2, 4),
        (1, 0, 4),
        (1, 1, 6),
        (1, 2, 2),
        (2, 0, 6),
        (2, 1, 2),
        (2, 2, 4),
    ]


def mean_of_replicas_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica's mean counts the same, which is right only for even shares: what averaging gradients
    would do."""
    add = LossSums.add

    def wrong(self: LossSums, returned: Any, chunk: Any) -> Any:
        return add(self, returned, chunk) * (chunk.batch / 2 / chunk.samples)

    monkeypatch.setattr(LossSums, "add", wrong)


def shares_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica learns of new shares a step too late."""
    cuts = MapReader._cut

    def late(self: MapReader, step: int, num_samples: int) -> Any:
        current = cuts(self, step, num_samples)
        before = cuts(self, max(step - 1, 0), num_samples)
        return before if self._replica == 1 else current

    monkeypatch.setattr(MapReader, "_cut", late)


@pytest.mark.parametrize(
    ("plant", "plan", "passes", "fails"),
    [
        (mean_of_replicas_means, "dp=2,shares={}", "even", "2+1"),
        (shares_of_the_step_before, "dp=2,shares={}", "2+1", "measured"),
    ],
)
@pytest.mark.slow
def test_a_mistake_that_only_uneven_or_changing_shares_show_is_found(
    plant: Any, plan: str, passes: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert report_of("mlp", "sgd", plan.format(passes), drop_last=True, batch_size=12).passed
    report = report_of("mlp", "sgd", plan.format(fails), drop_last=True, batch_size=12)
    assert not report.passed


# --- A slow rank.


def train_slowed(out: str) -> tuple[list[float], Any, list[str], dict[str, Tensor]]:
    notes: list[str] = []
    losses: list[float] = []
    listener = Listener(
        started=lambda text: None, note=notes.append, step=lambda progress: losses.append(progress.loss)
    )
    with Trainer(
        sleepy_job(),
        "dp=2,shares=measured",
        devices="cpu",
        dtype=torch.float64,
        listener=listener,
        share=True,
        out=out,
    ) as trainer:
        summary = trainer.fit()
        assert summary.predicted == summary.counted
        return (
            losses,
            trainer.shares.record,
            notes,
            {name: each.clone() for name, each in trainer.replicas[0].model.state_dict().items()},
        )


@pytest.mark.processes
def test_a_rank_three_times_slower_gets_about_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (losses, record, notes, state), (_, other_record, _, _) = on_ranks(
        train_slowed, 2, str(tmp_path), timeout_seconds=120.0
    )
    assert record == other_record and record
    # 18 + 6, were there nothing but sleep
    assert all(4 <= shares[1] <= 9 and sum(shares) == 24 for _, shares in record)
    assert any("replica 1 takes" in note and f"from step {record[0][0]}" in note for note in notes)
    # One device runs the recorded chunks, and so does a run with the record in place of measurements.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    plan = Plan(dp=2, shares="measured")
    reference = Reference(sleepy_job(), plan, torch.float64, shares=record)
    records = [step_of(reference) for _ in range(34)]
    assert losses == pytest.approx([each.loss for each in records], rel=1e-10)
    for name, value in records[-1].parameters.items():
        # 34 steps of AdamW make rounding larger
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
    assert run(sleepy_job(), str(plan), recorded_shares=record)[0] == pytest.approx(losses, rel=1e-10)
    resumed, _ = run(sleepy_job(), str(plan), resume=tmp_path / "step-00000017")
    assert resumed == pytest.approx(losses[17:], rel=1e-10)


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_line_writes_the_record_also_where_readers_run_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "train",
        "tests/sleepy_job.py:with_workers",
        "--plan",
        "dp=2,shares=measured",
        "--devices",
        "cpu",
        "--json",
        str(tmp_path / "records"),
    ]
    told = subprocess.run(
        [sys.executable, "-m", "meshloom", *words], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    lines = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    record = next(line["record"] for line in lines if line["event"] == "shares")
    # decided after the tenth step, when readers were ahead
    assert record[0][0] > 10 and 4 <= record[0][1][1] <= 9
    assert f"shares {record[0][1][0]}+{record[0][1][1]} from step {record[0][0]}: replica 1 takes" in told
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    reference = Reference(sleepy_job(), Plan(dp=2, shares="measured"), shares=record)
    expected = [step_of(reference).loss for _ in range(34)]
    # float32
    assert [line["loss"] for line in lines if line["event"] == "step"] == pytest.approx(expected, rel=1e-4)


def one_small_batch() -> None:
    with Trainer(replace(sleepy_job(), batch_size=1), "dp=2,shares=measured", devices="cpu"):
        pass


def refused() -> str:
    with pytest.raises(PlanError) as caught:
        one_small_batch()
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.slow
def test_a_batch_with_fewer_samples_than_replicas_cannot_be_measured() -> None:
    assert (
        on_ranks(refused, 2)
        == [
            "A batch of 1 sample leaves some of dp=2 replicas without any, so their speed cannot be measured. "
            "Use dp=1 or less, or a plan without shares=measured."
        ]
        * 2
    )

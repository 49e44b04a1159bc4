"""A run looks at what it will need later before its first step: where it saves, what lies there already, and
its evaluation."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import class_loss, make_job, vectors
from saving_jobs import names_in, save_step
from torch import Tensor, nn

from meshloom.checkpoint.checkpoint import find
from meshloom.checkpoint.writing import saving
from meshloom.checkpoint.writing.run_directory import open_directory
from meshloom.cli.main import main
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CheckpointError, JobError
from meshloom.core.job import Evaluate, Job
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.fitted import fitted

ASYNC = "dp=2,exchange=async"
FILE = str(Path(__file__).with_name("job_file.py"))


def refusing(steps: list[int]) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that notes its calls: nobody may have trained."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        steps.append(1)
        return class_loss(model, batch)

    return loss


# --- Where it saves.


@pytest.mark.parametrize("plan", ["dp=2", ASYNC])
def test_an_out_that_cannot_be_written_is_noticed_before_the_first_step(plan: str, tmp_path: Path) -> None:
    """It was noticed at the first save, which may be the last step: a night's training was lost to a typing
    error."""
    (tmp_path / "file").write_text("not a directory")
    steps: list[int] = []
    with pytest.raises(
        CheckpointError,
        match=r"Rank 0 cannot save in .*file/run: Not a directory .*\. Give a directory that it can write to\.$",
    ):
        Trainer(
            make_job("mlp", "sgd", loss=refusing(steps)), plan, devices="simulated", out=tmp_path / "file/run"
        )
    assert not steps


def test_a_rank_that_cannot_write_is_named_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = saving.write_synced

    def write(path: Path, content: bytes) -> None:
        if path.name == "1":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, content)

    monkeypatch.setattr(saving, "write_synced", write)
    sentences: list[str] = []

    def rank(group: Any) -> Any:
        try:
            open_directory(tmp_path / "run", group, resume=None, overwrite=False)
        except CheckpointError as error:
            sentences.append(str(error))

    in_turns([partial(rank, group) for group in simulated_groups(3)])
    assert (
        sentences
        == [
            f"Rank 1 cannot save in {tmp_path / 'run'}: Read-only file system. Give a directory that it can write to."
        ]
        * 3
    )
    assert names_in(tmp_path / "run") == []


def test_ranks_that_save_to_different_directories_say_so(tmp_path: Path) -> None:
    def rank(group: Any) -> Any:
        return open_directory(tmp_path / f"run-{group.rank}", group, resume=None, overwrite=False)

    with pytest.raises(
        CheckpointError,
        match=r"Rank 1 saves to .*run-1 and rank 0 to .*run-0\. Give all ranks one directory that they share\.",
    ):
        in_turns([partial(rank, group) for group in simulated_groups(2)])


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    with Trainer(make_job("mlp", "sgd"), "dp=2", devices="simulated", out=tmp_path / "run"):
        assert names_in(tmp_path / "run") == []


# --- What lies there already.


@pytest.mark.parametrize("plan", ["dp=2", ASYNC])
@pytest.mark.long
def test_a_fresh_run_into_an_old_directory_is_refused(plan: str, tmp_path: Path) -> None:
    """A second run with the same command deleted the newest checkpoints of the first, because only the last
    few are kept."""
    job = make_job("mlp", "sgd", steps=4, checkpoint_every=2, keep_checkpoints=2)
    fitted(job, "dp=2", out=tmp_path)
    before = names_in(tmp_path)
    sentence = (
        f"{tmp_path} holds checkpoints of an earlier run, the newest of step 4. Go on from it with --resume {tmp_path} (resume=), or begin anew with "
        "--overwrite (overwrite=True), which removes them once this run has saved its first."
    )
    # nor is going on from somewhere else a reason to delete these
    for resume in (None, save_step(tmp_path.with_name("other"), 1)):
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            Trainer(job, plan, devices="simulated", out=tmp_path, resume=resume)
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("plan", ["dp=2", ASYNC])
@pytest.mark.long
def test_overwriting_keeps_the_old_until_there_is_a_new_one(plan: str, tmp_path: Path) -> None:
    for step in (2, 900):
        save_step(tmp_path, step, keep=9)
    # goes too, or it would be in the way of resuming
    (tmp_path / "step-00000900/meta.json").write_text("damaged")
    job = make_job("mlp", "sgd", steps=6, checkpoint_every=2, keep_checkpoints=2)
    there: list[list[str]] = []

    def look(*_: object) -> None:
        there.append(names_in(tmp_path))

    listener = Listener(started=lambda text: None, note=lambda text: None, step=look, saved=look)
    fitted(job, plan, out=tmp_path, overwrite=True, listener=listener)
    assert there[0] == there[1] == ["step-00000002", "step-00000900"]
    assert there[2] == ["step-00000002"]
    assert there[-1] == ["step-00000004", "step-00000006"]
    assert names_in(tmp_path) == there[-1]


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match="goes on with the checkpoints in .*, and --overwrite replaces them. Leave one of them out",
    ):
        Trainer(
            make_job("mlp", "sgd"), "dp=2", devices="simulated", out=tmp_path, resume=tmp_path, overwrite=True
        )
    with pytest.raises(CheckpointError, match="which this run does not have"):
        Trainer(make_job("mlp", "sgd"), "dp=2", devices="simulated", overwrite=True)


@pytest.mark.long
def test_the_command_line_runs_twice_into_one_directory_only_if_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        FILE,
        "--plan",
        "dp=2",
        "--devices",
        "simulated",
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "2",
    ]
    assert main(words) == 0
    assert main(words) == 2
    assert "the newest of step 2. Go on from it with --resume" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


# --- What resuming finds there.


@pytest.mark.parametrize("plan", ["dp=2", ASYNC])
@pytest.mark.long
def test_a_newer_checkpoint_without_meta_is_not_passed_over_in_silence(plan: str, tmp_path: Path) -> None:
    job = make_job("mlp", "sgd", steps=4, checkpoint_every=2)
    fitted(job, "dp=2", out=tmp_path)
    (tmp_path / "step-00000004/meta.json").unlink()
    notes: list[str] = []
    Trainer(
        job,
        "dp=2",
        devices="simulated",
        resume=tmp_path,
        listener=Listener(started=lambda text: None, note=notes.append),
    ).close()
    newer, older = tmp_path / "step-00000004", tmp_path / "step-00000002"
    assert notes == [
        f"{newer} has no meta.json, so it cannot be read; going on from the one before it, {older}."
    ]


def test_a_damaged_older_checkpoint_does_not_block_a_newer_one(tmp_path: Path) -> None:
    paths = [save_step(tmp_path, step, keep=9) for step in (1, 2, 3)]
    (paths[0] / "meta.json").write_text("damaged")
    assert find(tmp_path) == paths[2]
    (paths[2] / "meta.json").write_text("damaged")
    assert find(tmp_path) == paths[2]  # and opening it says so


# --- Its evaluation.


class Counting(nn.Module):
    """Writes a buffer in every forward, draws in training mode; one module is kept in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(7, 5)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(7).eval()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.scale(self.drop(self.norm(x)))


def counting_job(metrics: dict[str, Any], **settings: Any) -> Job:
    evaluate = Evaluate(lambda: vectors(10), metrics, every=2)
    return replace(
        make_job("mlp", "sgd", steps=2, evaluate=evaluate, **settings), model=Counting, loss=class_loss
    )


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,microbatches=2", ASYNC])
def test_a_metric_that_fails_is_known_by_its_name_before_the_first_step(plan: str) -> None:
    def top(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).topk(9).values.mean()

    steps: list[int] = []
    job = replace(counting_job({"loss": class_loss, "top9": top}), loss=refusing(steps))
    with (
        pytest.raises(JobError, match="^Metric 'top9' of Evaluate failed with RuntimeError: .*index"),
        Trainer(job, plan, devices="simulated") as trainer,
    ):
        trainer.fit()
    assert not steps


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
@pytest.mark.long
def test_trying_evaluation_changes_nothing(plan: str) -> None:
    """Draws, buffers and modes are as without it: the run is the same bit for bit."""
    seen: list[float] = []
    kept: list[Any] = []

    def metric(model: nn.Module, batch: Any) -> Tensor:
        seen.append(float(torch.rand(())))
        return class_loss(model, batch)

    for job in (counting_job({"noise": metric}), replace(counting_job({"noise": metric}), evaluate=None)):
        with Trainer(job, plan, devices="simulated") as trainer:
            model = trainer.replicas[0].model
            torch.manual_seed(5)
            batches = trainer.batches()
            first = next(batches)
            kept.append(
                [
                    float(torch.rand(())),
                    int(model.get_buffer("calls")),
                    [each.training for each in model.modules()],
                ]
            )
            kept[-1].append(trainer.step(first))
            batches.close()
    assert seen and kept[0] == kept[1]


def test_only_one_batch_is_tried_and_only_once() -> None:
    sizes: list[int] = []

    def metric(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch["x"]))
        return class_loss(model, batch)

    job = replace(counting_job({"loss": metric}), batch_size=4)
    summary = fitted(job, "dp=1")
    assert sizes == [4, *[4, 4, 2]]
    assert summary.predicted.bytes == summary.counted.bytes


def test_a_metric_without_a_number_is_called_a_metric() -> None:
    job = counting_job({"words": lambda model, batch: "many"})
    with (
        Trainer(job, "dp=1", devices="simulated") as trainer,
        pytest.raises(JobError, match="^Metric 'words'.*returned a str"),
    ):
        trainer.fit()


@pytest.mark.parametrize("name", [".removed-step-00000002", ".saving-step-00000002", "step-00000002"])
def test_a_file_where_a_checkpoint_would_be_is_named_before_the_first_step(name: str, tmp_path: Path) -> None:
    """The story: "Not a directory (.../.removed-step-00000010). The checkpoint before it is whole", at the save of step 20."""
    (tmp_path / name).write_text("a note")
    (tmp_path / "step-by-step.txt").write_text("is none of ours")
    steps: list[int] = []
    said = rf"^Nothing can be saved: .*{re.escape(name)} is a file, and directories of checkpoints have such names; move it away\.$"
    with pytest.raises(CheckpointError, match=said):
        Trainer(make_job("mlp", "sgd", loss=refusing(steps)), "dp=2", devices="simulated", out=tmp_path)
    assert not steps and (tmp_path / name).read_text() == "a note"


def test_a_file_that_appears_later_is_named_by_the_next_save(tmp_path: Path) -> None:
    with Trainer(make_job("mlp", "sgd"), "dp=2", devices="simulated", out=tmp_path) as trainer:
        trainer.save()
        (tmp_path / ".removed-step-00000000").write_text("a note")
        with pytest.raises(
            CheckpointError, match=r"is a file, .* move it away\. The checkpoint before it is whole: "
        ):
            trainer.save()

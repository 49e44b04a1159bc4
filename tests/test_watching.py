"""What a run logs, in its directory and in dashboards."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import meshloom as ml
from meshloom.cli.main import main
from meshloom.core.job import Evaluate
from meshloom.telemetry.metrics_file import metrics_listener
from meshloom.telemetry.progress import Listener, Progress
from tests.jobs import class_loss, vectors
from tests.logging_jobs import logging_job

pytestmark = pytest.mark.usefixtures("own_path")

FILE = str(Path(__file__).with_name("logging_jobs.py")) + ":evaluated_job"


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_the_file_has_what_the_records_have(tmp_path: Path):
    """On a simulated mesh, along tp and pp."""
    words = ["train", FILE, "--plan", "pp=2,tp=2", "--devices", "simulated", "--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "records.jsonl")]) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["event"] == "step"]
    found = rows(tmp_path / "run")
    of_steps = [row for row in found if row["loss"]]
    assert [float(row["accuracy"]) for row in of_steps] == [each["logged"]["accuracy"] for each in steps]
    assert [float(row["loss"]) for row in of_steps] == [each["loss"] for each in steps]
    assert [row["step"] for row in found] == ["1", "2", "2", "3", "4", "4"]
    evaluated = [each["metrics"]["mean"] for each in records if each["event"] == "evaluation"]
    assert [float(row["evaluation/mean"]) for row in found if row["evaluation/mean"]] == evaluated


@pytest.mark.slow
@pytest.mark.processes
def test_processes_write_one_file(tmp_path: Path):
    assert (
        main(["train", FILE, "--plan", "dp=2", "--devices", "cpu", "--out", str(tmp_path), "--steps", "2"])
        == 0
    )
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "2"] and rows(tmp_path)[1]["accuracy"]


@pytest.mark.long
def test_a_resumed_run_goes_on_in_the_file(tmp_path: Path):
    """Steps that the checkpoint does not know are dropped from it; a new run begins it anew."""
    evaluate = Evaluate(data=vectors, metrics={"loss": class_loss}, every=9)
    job = logging_job(checkpoint_every=2, evaluate=evaluate)
    quiet = Listener(started=str, note=str)

    def train(steps: int, **given: Any) -> list[dict[str, str]]:
        with ml.Trainer(job, "dp=2", steps=steps, out=tmp_path, listener=quiet, **given) as trainer:
            trainer.fit()
        return rows(tmp_path)

    first = train(3)
    assert [row["step"] for row in first] == ["1", "2", "3", "3"]
    again = train(4, resume=tmp_path / "step-00000002")
    assert again[:2] == first[:2] and [row["step"] for row in again] == ["1", "2", "3", "4", "4"]
    assert again[2]["loss"] == first[2]["loss"]
    assert [row["step"] for row in train(1, overwrite=True)] == ["1", "1"]


def test_a_new_name_is_a_column_on_the_right(tmp_path: Path):
    notes: list[str] = []
    listener = metrics_listener(tmp_path / "made", notes.append)
    listener.step(progress(1, {}))
    listener.step(progress(2, {"late": 5.0}))
    listener.step(progress(3, {}))
    found = rows(tmp_path / "made")
    assert [row["late"] for row in found] == ["", "5.0", ""] and list(found[0])[-1] == "late"
    (tmp_path / "made" / "metrics.csv").unlink()
    (tmp_path / "made").rmdir()
    (tmp_path / "made").write_text("a file")
    listener.step(progress(4, {}))
    listener.step(progress(5, {}))
    assert len(notes) == 1 and "The run goes on without it." in notes[0]


def progress(step: int, logged: dict[str, float]) -> Progress:
    return Progress(
        step=step, steps=9, loss=1.0, gradient_norm=None, learning_rates=[0.1], samples_per_second=1.0, tokens_per_second=None, seconds_left=0.0,
        memory_bytes=1, logged=logged,
    )  # fmt: skip


@pytest.mark.long
def test_tensorboard_reads_what_was_logged(tmp_path: Path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ["train", FILE, "--plan", "dp=2", "--devices", "simulated", "--out", str(tmp_path)]
    assert main([*words, "--log", "tensorboard"]) == 0
    found = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    shown = [(each.step, each.value) for each in found.Scalars("accuracy")]
    logged = [(int(row["step"]), float(row["accuracy"])) for row in rows(tmp_path) if row["accuracy"]]
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in logged]  # float32
    assert [each.step for each in found.Scalars("evaluation/mean")] == [2, 4]


class Library(types.ModuleType):
    """Stands in for wandb and mlflow: notes the calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*values: Any, **named: Any) -> Any:
            self.calls.append((name, values, named))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "logs", "ends"),
    [
        ("wandb", "log", [("finish", (), {"exit_code": 0})]),
        ("mlflow", "log_metrics", [("end_run", ("FINISHED",), {})]),
    ],
)
@pytest.mark.long
def test_each_dashboard_gets_every_number(
    name: str, logs: str, ends: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library = Library(name)
    monkeypatch.setitem(sys.modules, name, library)
    words = ["train", FILE, "--plan", "dp=2", "--devices", "simulated", "--out", str(tmp_path), "--log", name]
    assert main(words) == 0
    of_steps = [(values[0], named["step"]) for call, values, named in library.calls if call == logs]
    assert [step for _, step in of_steps] == [1, 2, 2, 3, 4, 4]
    assert [numbers["accuracy"] for numbers, _ in of_steps if "accuracy" in numbers] == [
        float(row["accuracy"]) for row in rows(tmp_path) if row["accuracy"]
    ]
    assert library.calls[-1:] == ends


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--log", "wandb"],
            "--log wandb needs the package wandb, which is not installed. Install it (pip install wandb), or leave --log wandb out.",
        ),
        (
            ["--log", "tensorboard"],
            "--log tensorboard writes to the run's directory, and there is none. Give --out DIR.",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tensorboard")
    assert main(["train", FILE, "--devices", "simulated", "--plan", "dp=2", *words]) == 2
    assert said in capsys.readouterr().err

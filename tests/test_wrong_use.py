"""What is asked for wrongly is answered with one sentence that says what to do instead, before anything is
started."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as ml
from meshloom.cli.main import main
from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.launch.devices import check_ranks, choose_devices, choose_for_workers
from meshloom.launch.one_at_a_time import working_alone
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.test_cli import FILE


def _open(plan: str = "dp=1", **settings: Any) -> Trainer:
    return Trainer(make_job("mlp", "sgd", steps=4), plan, **{"listener": QUIET, **settings})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": torch.int64}, "dtype=torch.int64 must be a floating-point dtype of torch"),
        ({"listener": ml.Listener(step=3)}, "Listener(step=...) must be a function, not a int."),  # type: ignore[arg-type]
        ({"steps": "10"}, "steps='10' must be a whole number, 1 or more."),
        ({"steps": 2.0}, "steps=2.0 must be a whole number"),
        ({"timeout_seconds": "5"}, "timeout_seconds='5' must be a number of seconds, more than 0"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be a number of seconds, more than 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan must be a number of seconds"),
        (
            {"plan": "dp=2", "devices": "cpu"},
            "devices=cpu has a process for each of 2 ranks (dp=2), and this program is one. Start it with meshloom train",
        ),
        ({"plan": "dp=257"}, "257 simulated ranks would all be in this process"),
        ({"plan": "dp=1000000000"}, "Use dp=12 or less."),
        ({"plan": "pp=2,microbatches=1000000000"}, "Use at most 12 microbatches."),
    ],
)
def test_an_argument_that_no_trainer_takes_is_said(settings: dict[str, Any], sentence: str) -> None:
    """These ended in TypeErrors of timedelta and of comparisons, in tracebacks, or (devices=cpu) in something
    else than was asked for."""
    with pytest.raises(ml.MeshloomError, match=re.escape(sentence)):
        _open(**settings)


def test_a_trainer_that_is_closed_trains_no_more() -> None:
    with _open() as trainer:
        batch = next(batches := trainer.batches())
        batches.close()
    for call in (
        lambda: trainer.step(batch),
        lambda: next(trainer.batches()),
        trainer.evaluate,
        trainer.save,
        trainer.fit,
    ):
        with pytest.raises(ml.MeshloomError, match=r"This Trainer is closed, so \w+\(\) cannot run any more"):
            call()


def _of_another_kind(trainer: Trainer) -> None:
    trainer.step([torch.ones(2)])  # type: ignore[arg-type]


def _twice(trainer: Trainer) -> None:
    for batch in trainer.batches():
        trainer.step(batch)
        trainer.step(batch)


def _left_out(trainer: Trainer) -> None:
    list(trainer.batches())


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            _of_another_kind,
            "Trainer.step takes a batch that Trainer.batches() gave, not a list. Write: for batch in trainer.batches()",
        ),
        (
            _twice,
            "This is the batch of step 1, and the next step is 2: each batch is trained once, in order.",
        ),
        (_left_out, "The batch of step 1 was not trained, and the next one was asked for."),
    ],
)
def test_a_batch_is_trained_once_and_in_order(use: Callable[[Trainer], None], sentence: str) -> None:
    """A batch that was left out came again, for ever: `list(trainer.batches())` did not end."""
    with _open() as trainer, pytest.raises(ml.MeshloomError, match=re.escape(sentence)):
        use(trainer)


# --- Ranks beyond reason, and ranks without work.


@pytest.mark.parametrize(
    "words",
    [
        ["train", FILE, "--plan", "dp=1000"],
        ["train", FILE, "--plan", "dp=1000000", "--devices", "simulated"],
        ["train", FILE, "--plan", "dp=100000", "--devices", "cpu"],
        ["train", FILE, "--plan", "dp=1000,exchange=async"],
        ["verify", FILE, "--plan", "tp=1000000"],
        ["plan", FILE, "--plan", "dp=100000"],
        ["plan", FILE, "--ranks", "1000000"],
        ["describe", FILE, "--plan", "pp=1000000"],
        ["describe", FILE, "--plan", "dp=1000000000"],
        ["train", FILE, "--plan", "dp=2", "--timeout", "nan"],
        ["calibrate", "--timeout", "-1"],
    ],
)
def test_beyond_reason_is_refused_before_anything_starts(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """dp=1000 started a thousand processes on two cores."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Use " in line or "must be a number of seconds, more than 0" in line or "must be 1 or more" in line


@pytest.mark.parametrize("name", ["tree", "hierarchical"])
def test_an_exchange_of_earlier_versions_says_what_to_write_instead(name: str) -> None:
    sentence = (
        f"exchange={name} is gone. Use exchange=all_reduce, or exchange=ring, which shows its messages."
    )
    with pytest.raises(ml.MeshloomError, match=sentence):
        ml.Plan.parse(f"dp=4,exchange={name}")


def test_who_means_it_gets_more_ranks() -> None:
    with pytest.raises(DeviceError, match="--oversubscribe"):
        choose_devices(Mesh(dp=300), "simulated")
    assert choose_devices(Mesh(dp=300), "simulated", oversubscribe=True)[0] == "simulated"
    assert choose_for_workers(1, 300, "simulated", oversubscribe=True)[0] == "simulated"
    check_ranks(8, "cpu", oversubscribe=False)  # eight processes show the grid on any machine


@pytest.mark.covering("dp=16", "dp=5", "dp=2,microbatches=7")
@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("dp=16", "leaves 4 of dp=16 replicas without any"),
        ("dp=5,microbatches=2", ""),
        ("dp=2,microbatches=7", "fills 12 of 14 chunks"),
        ("tp=31", "tp=31 divides no parameter of the model"),
        ("pp=6", "leaves 4 ranks along pp (2, 3, 4, 5) without any parameters"),
    ],
)
@pytest.mark.long
def test_ranks_without_work_are_said_at_the_start(plan: str, sentence: str) -> None:
    job = ml.Job(
        model=lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
        loss=lambda model, batch: model(batch).square().exp().sin().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: list(torch.ones(24, 3)),
        batch_size=12,
        steps=1,
    )
    notes: list[str] = []
    with Trainer(
        job, plan, devices="simulated", listener=ml.Listener(started=lambda text: None, note=notes.append)
    ):
        pass
    assert [sentence in note for note in notes] == [True] * bool(sentence), notes


# --- Threads.


def _with_dropout(plan: str, found: dict[str, list[float]]) -> None:
    job = ml.Job(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: list(torch.linspace(-1, 1, 72).reshape(24, 3)),
        batch_size=6,
        steps=8,
    )
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        found[plan] = [trainer.step(batch) for batch in trainer.batches()]


@pytest.mark.slow
def test_trainers_of_several_threads_do_not_disturb_each_other() -> None:
    """They seed and draw from the same generators, so that each got some of the other's draws."""
    alone: dict[str, list[float]] = {}
    together: dict[str, list[float]] = {}
    plans = ("dp=1", "dp=2", "dp=3,microbatches=2", "tp=2")
    for plan in plans:
        _with_dropout(plan, alone)
    threads = [threading.Thread(target=_with_dropout, args=(plan, together)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_in_a_rank_of_several_processes_a_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would let another one go first, and they would wait for each other."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with working_alone():
                pass
        except ml.MeshloomError as error:
            errors.append(error)

    with working_alone(), working_alone():  # a thread may come back
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "Use one Trainer after the other" in str(errors[0])


def test_a_plan_for_a_few_more_chunks_than_samples_is_no_mistake() -> None:
    Plan.parse("dp=4,microbatches=8").check_batch(3)

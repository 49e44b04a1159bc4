"""A job enters in its steps the files of the features that it uses, and of no other: these attach themselves to points of a step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.job import Job
from meshloom.telemetry.progress import QUIET
from meshloom.telemetry.timings import Timings
from tests.jobs import averaged, class_loss, make_job

ROOT = Path(ml.__file__).parent
FIRST, LAST = 3, 5  # steps in which files are noted; the first few do more


class Tied(nn.Module):
    """Its first and last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Noisy(nn.Module):
    """It draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(7, 7), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.01 * torch.rand(7, generator=self.draws)


class Plain(nn.Module):
    """The same without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))


def unnormed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 5))


def over_pairs(model: nn.Module, batch: Any) -> Tensor:
    """It compares each sample with all of the batch."""
    rows = model(batch["x"])
    return (rows @ ml.gather(rows).T).square().mean()


def of_each(model: nn.Module, batch: Any) -> Tensor:
    """The same without."""
    rows = model(batch["x"])
    return (rows @ rows.T).square().mean()


JOB = replace(make_job("mlp", "sgd"), steps=LAST + 2, clip_grad_norm=None, loss=class_loss)
CASES: dict[str, tuple[Job, Job, str, set[str]]] = {
    "averages": (averaged(JOB, 0.9), JOB, "dp=2", {"optimizer/averages.py", "exchange/exchange.py", "replica/attach.py"}),
    "clipping": (replace(JOB, clip_grad_norm=1.0), JOB, "dp=2", {"core/device/readback.py", "optimizer/clipping.py"}),
    "batch statistics": (
        replace(JOB, model=normed), replace(JOB, model=unnormed), "dp=2",
        {f"replica/buffers/{name}.py" for name in ("declared_buffers", "merged_buffers", "norm_statistics")}
        | {"core/device/readback.py", "replica/replica_state.py"},  # what is noted of them
    ),
    "generators": (replace(JOB, model=Noisy), replace(JOB, model=Plain), "dp=2", {"core/modules/own_generators.py"}),
    "gathered rows": (
        replace(JOB, loss=over_pairs), replace(JOB, loss=of_each), "dp=2",
        {"core/moments/gather.py", "replica/exchanges/gathered_rows.py", "telemetry/traffic.py", "loops/means.py", "loops/ranks.py"},
    ),
    "borrowed": (
        replace(JOB, model=Tied), JOB, "pp=2,microbatches=2",
        {"parameters/pipeline_ownership.py", "pipeline/runtime/held_parameters.py", "replica/attach.py", "replica/gradient_completion.py"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_a_feature_enters_its_own_files_and_no_others(name: str) -> None:
    with_it, without, plan, files = CASES[name]
    there, here = entered(with_it, plan), entered(without, plan)
    assert there - here == files
    assert here - there == set()


SETTINGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a listener of steps": (
        {"listener": ml.Listener(started=lambda line: None, step=lambda progress: None)},
        {"launch/world.py", "machine/process_memory.py", "train/run_checkpoints.py"},
    ),
    "timings": ({"timings": Timings()}, {"telemetry/timings.py"}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.long
def test_a_setting_of_the_trainer_enters_its_own_files_and_no_others(name: str) -> None:
    settings, files = SETTINGS[name]
    there, here = entered_by_run(**{"listener": QUIET, **settings}), entered_by_run(listener=QUIET)
    assert there - here == files
    assert here - there == set()


def entered_by_run(**settings: Any) -> set[str]:
    """The files of the package that a few steps of `fit()` enter."""
    found = set[str]()
    with (
        noted(found) as noting,
        ml.Trainer(JOB, "dp=2", devices="simulated", cache="off", **settings) as trainer,
    ):
        run = trainer.synchronous
        assert run is not None
        step = run.step

        def stepped(batch: Any) -> float:
            noting.set() if FIRST <= batch.step <= LAST else noting.clear()
            return step(batch)

        run.step = stepped  # type: ignore[method-assign]
        trainer.fit()
    return {str(Path(each).relative_to(ROOT)) for each in found if Path(each).is_relative_to(ROOT)}


def entered(job: Job, plan: str) -> set[str]:
    """The files of the package that a few steps enter, on all simulated ranks."""
    found = set[str]()
    with (
        noted(found) as noting,
        ml.Trainer(job, plan, devices="simulated", cache="off") as trainer,
    ):
        for number, batch in enumerate(trainer.batches()):
            noting.set() if FIRST <= number <= LAST else noting.clear()
            trainer.step(batch)
    return {str(Path(each).relative_to(ROOT)) for each in found if Path(each).is_relative_to(ROOT)}


@contextmanager
def noted(found: set[str]) -> Iterator[threading.Event]:
    """Adds the files of functions that are called while the event is set, in this thread and in those that are made here."""
    noting = threading.Event()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and noting.is_set():
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield noting
    finally:
        sys.setprofile(before)
        threading.setprofile(None)

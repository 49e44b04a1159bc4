"""Losses that read something besides the model and the batch's tensors are equal to one device's, or refused
by name: never silently something else.

Found from outside: a number that changed between two steps, an attribute of the data set as a curriculum has
it, stayed what it was at first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError, MeshloomError, TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.program.capture.outside import Outside
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.jobs import GPT, Samples, token_loss, vectors
from tests.loss_jobs import EQUAL, REFUSED, job_of, job_with, mlp

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

COUNT = 0
SCALE = 1.0
TABLE = {"scale": 1.0, "other": 0}


def ce(m: nn.Module, batch: dict[str, Tensor], scale: Any = 1.0) -> Tensor:
    return F.cross_entropy(m(batch["x"] * scale), batch["y"])


# --- Losses that change what they read.


def counter_in_a_closure() -> Job:
    count = 0

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal count
        count += 1
        return ce(m, batch, 1.0 if count < 1000 else 0.5)  # a program is the same for the first 999

    return job_of(loss)


def counter_in_a_global() -> Job:
    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return ce(m, batch, 1.0 if COUNT < 1000 else 0.5)

    return job_of(loss)


def counter_in_a_dict() -> Job:
    state = {"calls": 0}

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        state["calls"] += 1
        return ce(m, batch, 1.0 if state["calls"] < 1000 else 0.5)

    return job_of(loss)


def an_iterator() -> Job:
    scales = itertools.chain([1.0] * 1000, itertools.repeat(0.5))
    return job_of(lambda m, batch: ce(m, batch, next(scales)))


def a_tensor_outside() -> Job:
    centre = torch.zeros(7)

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = ce(m, {**batch, "x": batch["x"] - centre})
        centre.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        return found

    return job_of(loss)


def the_clock() -> Job:
    return job_of(lambda m, batch: ce(m, batch, time.perf_counter() % 1))


SELF_CHANGED = [
    counter_in_a_closure,
    counter_in_a_global,
    counter_in_a_dict,
    an_iterator,
]


@pytest.mark.covering("an_iterator", "counter_in_a_closure")
@pytest.mark.parametrize("make", SELF_CHANGED)
@pytest.mark.long
def test_a_loss_that_changes_what_it_reads_is_refused_before_the_first_step(make: Callable[[], Job]):
    with pytest.raises(CaptureError), Trainer(make(), "pp=2", devices="simulated"):
        pass


@pytest.mark.covering("the_clock")
@pytest.mark.parametrize("make", [a_tensor_outside, the_clock])
@pytest.mark.slow
def test_what_ranks_would_compute_differently_is_refused_before_the_first_step(make: Callable[[], Job]):
    """A tensor outside of the model that each step changes, and a clock."""
    with pytest.raises(CaptureError), Trainer(make(), "tp=2", devices="simulated"):
        pass


@pytest.mark.long
def test_the_refusal_names_what_it_is():
    for make, name in (
        (counter_in_a_closure, "reads count and changes it"),
        (an_iterator, "takes what comes next from scales, a chain"),
    ):
        with pytest.raises(CaptureError, match=name), Trainer(make(), "tp=2", devices="simulated"):
            pass


# the others are in test_batch_values.py
USUAL = ("float", "int that says how often", "text", "words")


@pytest.mark.covering("float", "words")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in (*EQUAL, *REFUSED)],
)
@pytest.mark.slow
def test_a_batch_of_more_than_tensors_is_equal(name: str):
    extra, loss = (EQUAL.get(name) or REFUSED[name])[:2]
    try:
        report = verify(job_with(extra, loss), Plan.parse("pp=2"), devices="simulated", dtype=torch.float64)
        found = "equal" if report and report.passed else "wrong"
    except MeshloomError as refused:
        found = str(refused)
    assert found == "equal"


# --- What changes from outside between steps.


class Curriculum(Samples):
    """Its difficulty grows with every sample that is read."""

    def __init__(self) -> None:
        super().__init__(**vectors().fields)
        self.difficulty = 1.0
        self.read = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        self.difficulty = 1.0 + self.read // 12
        return super().__getitem__(index)


@pytest.mark.slow
def test_an_attribute_of_the_data_set_that_changes_is_noticed():
    data = Curriculum()
    job = job_of(lambda m, batch: ce(m, batch, data.difficulty), data=lambda: data)
    with pytest.raises(
        TrainingError,
        match=r"The loss reads data.difficulty, which was \d.0 when the loss was captured and is \d.0 now",
    ):
        train(job, "pp=2", lambda: None)
    train(job_of(lambda m, batch: ce(m, batch), data=lambda: data), "pp=2", lambda: None)  # nobody reads it


def train(job: Job, plan: str, between: Callable[[], Any]) -> list[float]:
    with Trainer(job, plan, devices="simulated") as trainer:
        found = []
        for batch in trainer.batches():
            found.append(trainer.step(batch))
            between()
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.net(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.temperature * SCALE


def changes() -> Iterator[tuple[str, Job, Callable[[], Any]]]:
    holder = SimpleNamespace(scale=1.0, step=0)
    centre = torch.zeros(7)
    scales = [1.0, 2.0]
    number = 1.0

    def of_number(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return ce(m, batch, number)

    def change_number() -> None:
        nonlocal number
        number = 2.0

    def helper() -> float:
        return holder.scale

    yield "number", job_of(of_number), change_number
    yield "holder.scale", job_of(lambda m, b: ce(m, b, helper())), lambda: setattr(holder, "scale", 2.0)
    yield "centre", job_of(lambda m, b: ce(m, {**b, "x": b["x"] - centre})), lambda: centre.add_(1)
    yield (
        r"TABLE \(a global of .*\)\['scale'\]",
        job_of(lambda m, b: ce(m, b, TABLE["scale"])),
        lambda: TABLE.update(scale=2.0),
    )
    yield (
        r"SCALE \(a global of .*\)",
        job_of(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), model=Net),
        lambda: globals().update(SCALE=2.0),
    )
    yield r"scales\[0\]", job_of(lambda m, b: ce(m, b, scales[0])), lambda: scales.__setitem__(0, 3.0)


@pytest.mark.covering("0", "5")
@pytest.mark.parametrize("number", range(6))
@pytest.mark.long
def test_what_is_changed_between_two_steps_is_noticed_by_name(number: int):
    name, job, change = list(changes())[number]
    try:
        with pytest.raises(TrainingError, match=f"The loss reads {name}, which was"):
            train(job, "pp=2", change)
    finally:
        TABLE["scale"], globals()["SCALE"] = 1.0, 1.0


def test_an_attribute_of_the_model_changed_between_steps_is_noticed():
    job = job_of(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), model=Net)
    with Trainer(job, "tp=2", devices="simulated") as trainer:
        batches = trainer.batches()
        trainer.step(next(batches))
        for replica in trainer.replicas:
            replica.model.temperature = 0.5
        with pytest.raises(
            TrainingError,
            match="The loss reads temperature, which was 1.0 when the loss was captured and is 0.5 now",
        ):
            trainer.step(next(batches))


@pytest.mark.long
def test_what_is_only_written_or_beside_what_is_read_may_change():
    """Logging: a dict that the loss writes, entries and attributes that it does not name, a counter of the
    loop's own."""
    history: dict[str, Any] = {"steps": 0}
    holder = SimpleNamespace(scale=1.5, step=0)
    started = time.perf_counter()

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = ce(m, batch, holder.scale)
        history["loss"] = found.detach()
        history["seconds"] = time.perf_counter() - started
        return found

    def between() -> None:
        holder.step += 1
        history["steps"] += 1
        TABLE["other"] += 1

    assert train(job_of(loss), "pp=2", between) == pytest.approx(
        train(job_of(loss), "dp=1", between), rel=1e-6
    )


def test_under_dp_everything_is_as_it_is_in_eager():
    expected = [list(map(float, torch.ones(1)))]
    for plan in ("dp=1", "dp=2"):
        number = 1.0

        def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return ce(m, batch) * number  # noqa: B023

        def change() -> None:
            nonlocal number
            number /= 2

        found = train(job_of(loss), plan, change)
        expected.append(found)
        assert found[0] > 1.5 * found[1] > 2 * found[2]
    assert expected[1] == pytest.approx(expected[2], rel=1e-6)


def test_looking_costs_little():
    """Places, not their walk, are what a step looks at: a transformer of the tests has a few dozen."""
    outside = Outside(token_loss, GPT(layers=4))
    assert outside.changed() is None and len(outside._places) < 100

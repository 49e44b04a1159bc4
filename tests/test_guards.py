"""Losses that read something besides the model and the batch's tensors are equal to one device's, or refused by name before
the first step: never silently something else, not even after a hundred steps.

Found from outside: a number that changed between two steps, an attribute of the data set as a curriculum has
it, stayed what it was at first.
"""

from __future__ import annotations

import datetime
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError, MeshloomError, TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.program.capture.guarded_values import check_step
from meshloom.program.capture.guards import Guards
from meshloom.program.capture.shapes import capture_shapes
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.jobs import GPT, Samples, token_loss, vectors
from tests.loss_jobs import EQUAL, REFUSED, job_of, job_with, mlp
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

num_calls = 0
SCALE = 1.0
TABLE = {"scale": 1.0, "other": 0}
WAYS_OUT = ("register", "Job(buffers=", "meshloom.step()", "in collate", "Job(leaves=[", "dp and zero")


def ce(m: nn.Module, batch: dict[str, Tensor], scale: Any = 1.0) -> Tensor:
    return F.cross_entropy(m(batch["x"] * scale), batch["y"])


def of_model(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ce(m, batch)


# --- What a run of the loss changes and reads. A program is the same for the first 99 steps.


def counter_in_a_closure() -> Job:
    count = 0

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal count
        count += 1  # sets count
        return ce(m, batch, 1.0 if count < 100 else 0.5)

    return job_of(loss)


def counter_in_a_global() -> Job:
    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        global num_calls  # noqa: PLW0603
        num_calls += 1  # sets num_calls
        return ce(m, batch, 1.0 if num_calls < 100 else 0.5)

    return job_of(loss)


def counter_in_a_dict() -> Job:
    state = {"calls": 0}

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        state["calls"] += 1  # sets state['calls']
        return ce(m, batch, 1.0 if state["calls"] < 100 else 0.5)

    return job_of(loss)


def counter_in_a_list() -> Job:
    calls: list[int] = []

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls.append(1)  # sets calls
        return ce(m, batch, 1.0 if len(calls) < 100 else 0.5)

    return job_of(loss)


def counter_in_a_list_of_the_model() -> Job:
    class Remembers(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[float] = []

        def scale(self, x: Tensor) -> float:
            self.history.append(float(len(self.history)))  # sets history
            return 1.0 if len(self.history) < 100 else 0.5

    return job_of(of_model, model=Remembers)


def counter_in_an_object() -> Job:
    class Schedule:
        step = 0

        def value(self) -> float:
            self.step += 1  # sets schedule.step
            return 1.0 if self.step < 100 else 0.5

    schedule = Schedule()
    return job_of(lambda m, batch: ce(m, batch, schedule.value()))


class Scaled(nn.Module):
    """A network whose result is scaled by what a subclass computes."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = mlp()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale(x)

    def scale(self, x: Tensor) -> Any:
        return 1.0


def counter_in_a_forward() -> Job:
    class Counts(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if self.step < 100:
                self.step += 1  # sets step
            return self.net(x) * (1.0 if self.step < 100 else 0.5)

    return job_of(of_model, model=Counts)


def counter_that_is_not_there_at_first() -> Job:
    class Counts(Scaled):
        def scale(self, x: Tensor) -> float:
            self.calls = getattr(self, "calls", 0) + 1  # sets calls
            return 1.0 if self.calls < 100 else 0.5

    return job_of(of_model, model=Counts)


def counter_that_the_loss_reads() -> Job:
    def loss(m: Any, batch: dict[str, Tensor]) -> Tensor:
        if m.step < 100:
            m.step += 1  # sets step
        return ce(m, batch, 1.0 if m.step < 100 else 0.5)

    return job_of(loss, model=Scaled)


def counter_in_a_method_that_the_loss_calls() -> Job:
    class Energy(Scaled):
        @torch.no_grad()
        def energy(self, x: Tensor) -> Tensor:
            self.step += 1  # sets step
            return self.net(x) * (1.0 if self.step < 100 else 0.5)

    return job_of(lambda m, batch: ce(m, batch) + m.energy(batch["x"]).mean(), model=Energy)


def counter_in_a_hook() -> Job:
    def model() -> nn.Module:
        state = {"calls": 0}

        def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            state["calls"] += 1  # sets state['calls']
            return y if state["calls"] < 100 else y.clamp(-1, 1)

        net = mlp()
        net.register_forward_hook(hook)
        return net

    return job_of(of_model, model=model)


def switch_that_turns_back() -> Job:
    class Alternates(Scaled):
        odd = False

        def scale(self, x: Tensor) -> float:
            self.odd = not self.odd  # sets odd
            return 1.0

    return job_of(of_model, model=Alternates)


def a_tensor_outside() -> Job:
    centre = torch.zeros(7)

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = ce(m, {**batch, "x": batch["x"] - centre})
        with torch.no_grad():
            centre.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        return found

    return job_of(loss)


def a_generator() -> Job:
    drawn = random.Random(0)
    return job_of(lambda m, batch: ce(m, batch, 1.0 if drawn.random() < 0.999 else 0.5))


CHANGED = [
    counter_in_a_closure,
    counter_in_a_global,
    counter_in_a_dict,
    counter_in_a_list,
    counter_in_an_object,
    counter_in_a_list_of_the_model,
    counter_in_a_forward,
    counter_that_is_not_there_at_first,
    counter_that_the_loss_reads,
    counter_in_a_method_that_the_loss_calls,
    counter_in_a_hook,
    switch_that_turns_back,
]


def refusal(job: Job, plan: str) -> str:
    with pytest.raises(CaptureError) as refused, Trainer(job, plan, devices="simulated"):
        pass
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.covering("counter_in_a_forward-tp=2", "counter_in_a_global-pp=2,microbatches=2")
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
@pytest.mark.parametrize("make", CHANGED)
def test_what_a_run_changes_and_reads_is_refused_before_the_first_step(make: Callable[[], Job], plan: str):
    """By name, with the line that sets it and what to write instead."""
    found = refusal(make(), plan)
    line = re.search(r"test_guards\.py:\d+ \(.*?# sets (.*?)\)", found)
    assert line is not None, found
    assert f"The loss reads {line[1]} at " in found, found
    assert all(way in found for way in WAYS_OUT[1:]), found


def test_a_tensor_and_a_generator_that_a_run_changes_are_refused():
    assert "reads centre at" in refusal(a_tensor_outside(), "tp=2")
    found = refusal(a_generator(), "tp=2")
    assert "reads drawn at" in found and "the same Random with other contents" in found


@pytest.mark.parametrize("make", [counter_in_a_forward, counter_in_a_global])
def test_a_prediction_refuses_them_too(make: Callable[[], Job]):
    with pytest.raises(CaptureError, match="it was 0, and is 1 after a batch"):
        capture_shapes(make(), {"x": torch.randn(6, 7), "y": torch.zeros(6, dtype=torch.long)})


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_under_dp_and_zero_nothing_is_refused(plan: str):
    for make in (*CHANGED, a_tensor_outside, a_generator, an_iterator, the_clock, todays_date):
        with Trainer(make(), plan, devices="simulated") as trainer:
            trainer.step(next(iter(trainer.batches())))


# --- Clocks, and what is next.


def the_clock() -> Job:
    return job_of(lambda m, batch: ce(m, batch, 1.0 if time.perf_counter() < 1e12 else 0.5))


def todays_date() -> Job:
    return job_of(lambda m, batch: ce(m, batch, 1.0 if datetime.datetime.now().year > 2000 else 0.5))


def a_clock_under_another_name() -> Job:
    from time import monotonic as now

    class Old(Scaled):
        def scale(self, x: Tensor) -> float:
            return 1.0 if now() > 0 else 0.5

    return job_of(of_model, model=Old)


def an_iterator() -> Job:
    scales = itertools.chain([1.0] * 100, itertools.repeat(0.5))
    return job_of(lambda m, batch: ce(m, batch, next(scales)))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (the_clock, r"reads the clock: time.perf_counter at .*test_guards.py:\d+ "),
        (todays_date, r"reads the clock: datetime.datetime.now at .*test_guards.py:\d+ "),
        (a_clock_under_another_name, r"reads the clock: now at .*test_guards.py:\d+ "),
        (an_iterator, r"takes what comes next from scales at .*test_guards.py:\d+ .*, a chain"),
    ],
)
def test_clocks_and_iterators_are_refused_by_name(make: Callable[[], Job], sentence: str):
    found = refusal(make(), "tp=2")
    assert re.search(sentence, found) and "in collate" in found


# --- What is set up, or left for the loss.


def a_cache() -> Job:
    class Rotary(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.length_cached: int | None = None
            self.cached: Tensor | None = None

        def scale(self, x: Tensor) -> Any:
            if self.length_cached != x.shape[1]:
                self.length_cached = x.shape[1]
                self.cached = torch.arange(5.0, dtype=x.dtype).cos()
            return self.cached

    return job_of(of_model, model=Rotary)


def a_side_loss() -> Job:
    class Experts(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.side: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.side = x.square().mean() * self.net[0].weight.sum()
            return self.net(x)

    return job_of(lambda m, batch: ce(m, batch) + 0.01 * m.side, model=Experts)


def a_leaf_that_counts() -> Job:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x if time.perf_counter() > 0 and self.calls < 10_000 else -x

    model = lambda: nn.Sequential(mlp(), Counts())  # noqa: E731
    return job_of(of_model, model=model, leaves=[Counts])


@pytest.mark.covering("a_cache-tp=2", "a_side_loss-pp=2,microbatches=2")
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
@pytest.mark.parametrize("make", [a_cache, a_side_loss, a_leaf_that_counts])
def test_caches_side_losses_and_leaves_are_equal(make: Callable[[], Job], plan: str):
    equals_one_device(make(), plan)


def test_a_cache_outside_is_as_it_was_afterwards():
    holder = SimpleNamespace(cached=None)

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if holder.cached is None:
            holder.cached = torch.ones(7, dtype=batch["x"].dtype)
        return ce(m, batch, holder.cached)

    with Trainer(job_of(loss), "tp=2", devices="simulated") as trainer:
        assert holder.cached is None
        trainer.step(next(iter(trainer.batches())))


# the others are in test_batch_values.py
@pytest.mark.parametrize("name", [*EQUAL, *REFUSED])
@pytest.mark.slow
def test_a_batch_of_more_than_tensors_is_equal(name: str):
    extra, loss = (EQUAL.get(name) or REFUSED[name])[:2]
    try:
        report = verify(job_with(extra, loss), Plan.parse("pp=2"), devices="simulated", dtype=torch.float64)
        found = "equal" if report and report.passed else "wrong"
    except MeshloomError as refused:
        found = str(refused)
    assert found == "equal"


# --- What changes from outside.


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


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_an_attribute_that_the_data_set_counts_is_refused_before_the_first_step(plan: str):
    data = Curriculum()
    found = refusal(job_of(lambda m, batch: ce(m, batch, data.difficulty), data=lambda: data), plan)
    assert re.search(
        r"reads data.difficulty at .*, which .*\(self.difficulty = .*\) sets as data is read",
        found,
    )
    assert "Return it with the samples" in found
    if plan == "tp=2":
        train(job_of(of_model, data=lambda: data), plan, lambda: None)  # nobody reads it


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
    yield r"TABLE\['scale'\]", job_of(lambda m, b: ce(m, b, TABLE["scale"])), lambda: TABLE.update(scale=2.0)
    yield "SCALE", job_of(of_model, model=Net), lambda: globals().update(SCALE=2.0)
    yield "scales", job_of(lambda m, b: ce(m, b, scales[0])), lambda: scales.__setitem__(0, 3.0)


@pytest.mark.covering("0", "5")
@pytest.mark.parametrize("number", range(6))
def test_what_is_changed_between_two_steps_is_refused_by_name(number: int):
    name, job, change = list(changes())[number]
    try:
        with pytest.raises(
            TrainingError, match=rf"The loss reads {name} at .*test_guards.py:\d+ .*, which was"
        ) as found:
            train(job, "pp=2", change)
        assert all(
            way in str(found.value) for way in ("meshloom.step()", "in collate", "a buffer of the model")
        )
    finally:
        TABLE["scale"], globals()["SCALE"] = 1.0, 1.0


def test_slots_defaults_and_arrays_are_guarded():
    class Slotted:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = 1.0

    class Usual:
        scale = 1.0

    slotted, usual, array = Slotted(), Usual(), numpy.ones(3)
    for loss, change in (
        (lambda m, b: ce(m, b, slotted.scale), lambda: setattr(slotted, "scale", 2.0)),
        (lambda m, b: ce(m, b, usual.scale), lambda: setattr(usual, "scale", 2.0)),
        (lambda m, b: ce(m, b, array[0]), lambda: array.fill(2)),
    ):
        guards = Guards(loss)
        check_step(guards.values)
        change()
        with pytest.raises(TrainingError):
            check_step(guards.values)


def test_an_attribute_of_the_model_changed_between_steps_is_refused():
    """As a schedule in a callback changes it."""
    with Trainer(job_of(of_model, model=Net), "tp=2", devices="simulated") as trainer:
        batches = trainer.batches()
        trainer.step(next(batches))
        for replica in trainer.replicas:
            vars(replica.model)["temperature"] = 0.5
        with pytest.raises(
            TrainingError, match=r"The loss reads temperature at .*, which was 1.0 when .* and is 0.5 now"
        ):
            trainer.step(next(batches))


def test_what_is_only_written_or_beside_what_is_read_may_change():
    """Logging: a dict and a list that the loss fills, entries and attributes that it does not name, a counter of the
    loop's own."""
    history: dict[str, Any] = {"steps": 0}
    sizes: list[int] = []
    holder = SimpleNamespace(scale=1.5, step=0)

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = ce(m, batch, holder.scale)
        history["loss"] = found.detach()
        sizes.append(len(batch["x"]))
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


class Hooked(nn.Module):
    """Features that a hook takes, which refers to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.taken: dict[str, Tensor] = {}
        self.net.register_forward_hook(lambda module, args, output: self.taken.update(out=output))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0.0 * self.taken["out"]


def test_the_model_s_own_tensors_may_change_where_a_hook_refers_to_it():
    model = Hooked()
    guards = Guards(ce, model)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1.0)
    check_step(guards.values)


def test_looking_costs_little():
    """Places, not their walk, are what a step looks at: a transformer of the tests has a few dozen."""
    guards: Any = Guards(token_loss, GPT(layers=4))
    check_step(guards.values)
    assert len(guards._places) < 100
